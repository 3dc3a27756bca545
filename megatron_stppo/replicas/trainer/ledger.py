"""The episodes of an asynchronous run's ledger (data/ledger.py): assigned, finished, in a checkpoint.

Tasks are drawn in the cursor's order, each for a group. Nothing that was admitted is thrown away: every group
is trained on exactly once, after any number of interruptions, or is dropped by dynamic sampling.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from megatron_stppo.base.types import FAILED, Summary, Task, Trajectory
from megatron_stppo.data.ledger import Admitted, Ledger, Taken, Terms, without_variance
from megatron_stppo.data.tasks import TaskCursor
from megatron_stppo.replicas.wire.episodes import Done
from megatron_stppo.replicas.wire.messages import Assignment
from megatron_stppo.validation.run_folder import check_open


@dataclass(frozen=True)
class Lengths:
    """How many episodes have turns, and how many tokens their turns have together.

    Example: Lengths.of([a, b]) of an episode with turns of 3 and 1 tokens and of one that failed before its
    first turn is Lengths(episodes=1, tokens=4), whose mean is 4.
    """

    episodes: int = 0
    tokens: int = 0

    @classmethod
    def of(cls, trajectories: Iterable[Trajectory]) -> Lengths:
        played = [
            sum(len(turn.token_ids) for history in t.histories() for turn in history.turns)
            for t in trajectories
            if t.turns
        ]
        return cls(len(played), sum(played))

    def __add__(self, other: Lengths) -> Lengths:
        return Lengths(self.episodes + other.episodes, self.tokens + other.tokens)

    def __sub__(self, other: Lengths) -> Lengths:
        return Lengths(self.episodes - other.episodes, self.tokens - other.tokens)

    @property
    def mean(self) -> float:
        """Tokens per episode; 0 without episodes."""
        return self.tokens / max(1, self.episodes)


@dataclass
class Group:
    """The episodes of one task.

    Example: Group(task, Admitted(25, 3, 1)) gets the random numbers of the second group of iteration 3.
    """

    task: Task
    drawn: Admitted  # its number, and what decides its random numbers
    finished: dict[int, Trajectory] = field(default_factory=dict)  # by episode number


class EpisodeLedger:
    """Admits episodes, stores the finished ones, and takes batches from them. Not collective: on rank 0.

    Example, with batches of one group of one episode and max_staleness=1: admit(0) returns the episodes 0 and
    1; after finish(1, b) batch() is None; after finish(0, a) it is [a].
    """

    def __init__(
        self, cursor: TaskCursor, terms: Terms, seed: int = 0, temperature: float = 1.0, top_p: float = 1.0
    ) -> None:
        """cursor: at its start; it is moved. seed: of the run."""
        self._cursor, self._terms = cursor, terms
        self._seed, self._sampling = seed, (temperature, top_p)
        self._book = Ledger(terms)
        self._groups: dict[int, Group] = {}  # those that are open, or were dropped for the next batch
        # The cursor before the oldest open group, and the trained groups that follow that group.
        self._behind = cursor.state()
        self._ahead: dict[int, Lengths] = {}
        self._trained = Lengths()  # of all episodes that were trained on
        self.taken = Taken([])  # of the last batch
        self.dropped: list[Summary] = []  # the episodes that were dropped for it; each group has a number
        self._before = dict[int, Group](), self._behind, self._ahead, self._trained  # for put_back

    def admit(self, iteration: int) -> list[Assignment]:
        """Admit the groups that iteration `iteration` allows, and return their episodes."""
        return self._assigned(self._book.admit(iteration))

    def resample(self) -> list[Assignment]:
        """Drop the groups without variance of the next batch, if all its groups have completed.

        Return the episodes of the groups that are admitted in their place; [] if none is dropped. Call it
        again until then, before `batch`.
        """
        numbers = self._book.droppable()
        flat = without_variance(_summaries(self._groups[number] for number in numbers))
        return self._assigned(self._book.replace([numbers[place] for place in sorted(flat)]))

    def unfinished(self) -> list[Assignment]:
        """Return the admitted episodes that have not finished; they are played again after a resume."""
        groups = [self._groups[number] for number in self._book.open]
        return [e for group in groups for e in self._episodes(group) if e.number not in group.finished]

    def finish(self, number: int, trajectory: Trajectory) -> bool:
        """Store a finished episode. Return False if it is not open or has finished before."""
        of = number // self._terms.samples
        if of not in self._book.open or number in (group := self._groups[of]).finished:
            return False
        # The task is the trainer's own copy: a replica might return another one.
        group.finished[number] = replace(trajectory, task=group.task)
        if len(group.finished) == self._terms.samples:
            self._book.complete(of)
        return True

    def batch(self) -> list[Trajectory] | None:
        """Take the trajectories of the next batch, group by group; None if they have not all finished."""
        if (taken := self._book.take()) is None:
            return None
        dropped = sorted(number for of_round in taken.dropped for number in of_round)
        closed = {number: self._groups.pop(number) for number in [*dropped, *taken.groups]}
        self.taken, self.dropped = taken, _summaries(closed[number] for number in dropped)
        self._before = closed, self._behind, dict(self._ahead), self._trained
        self._close({number: Lengths.of(group.finished.values()) for number, group in closed.items()})
        return [
            replace(trajectory, group=place)
            for place, number in enumerate(taken.groups)
            for _, trajectory in sorted(closed[number].finished.items())
        ]

    def put_back(self) -> None:
        """Open the groups of the last batch again, and those that were dropped for it: too many episodes have
        failed. For a checkpoint; then the run ends."""
        closed, self._behind, self._ahead, self._trained = self._before
        self._book.put_back(self.taken)
        self._groups = dict(sorted((closed | self._groups).items()))

    @property
    def settled(self) -> bool:
        """Whether all admitted episodes have finished."""
        return len(self._book.completed) == len(self._book.open)

    @property
    def ready(self) -> int:
        """The number of episodes that have finished and are not trained."""
        return sum(len(self._groups[number].finished) for number in self._book.open)

    def bias(self) -> dict[str, float]:
        """Return the metrics of what order=completion prefers, by name; {} in the order of admission.

        overtaken: open groups that were admitted before a group of the last batch.
        length_bias: the mean response length of the episodes that were trained on or dropped, minus that of
        as many that were admitted first, as far as they have finished. In tokens.
        Example: in batches of one group of one episode, group 1 of 10 tokens was trained on and group 0 of
        50 tokens has finished after it: overtaken is 1 and length_bias -40.
        """
        if self._terms.order == "admission":
            return {}
        numbers = list(self._book.open)
        count = (numbers[0] if numbers else self._book.next) + len(self._ahead)  # groups that are closed
        early = sum((of_one for number, of_one in self._ahead.items() if number >= count), Lengths())
        slow = [self._groups[number] for number in numbers if number < count]
        instead = sum((Lengths.of(group.finished.values()) for group in slow), Lengths())
        return {
            "overtaken": sum(number < max(self.taken.groups, default=0) for number in numbers),
            "length_bias": self._trained.mean - (self._trained - early + instead).mean,
        }

    def state(self) -> dict[str, Any]:
        """Return a checkpoint's state, JSON-serialisable. `cursor` is where a colocated run continues."""
        tasks, book = self._terms.tasks, self._book
        return {
            "cursor": dict(self._behind),
            "ledger": {
                "tasks": tasks,
                "samples": self._terms.samples,
                "first": min(self._groups, default=book.next),
                "next": book.next,
                "trained": {str(number): asdict(lengths) for number, lengths in self._ahead.items()},
                "lengths": asdict(self._trained),
                "drops": book.drops,
                "extra": book.extra,
                "rounds": book.rounds,
                # where it is not that of the number
                "drawn": {
                    str(number): group.drawn[1:]
                    for number, group in self._groups.items()
                    if group.drawn != (number, *divmod(number, tasks))
                },
            },
        }

    def kept(self) -> list[Done]:
        """Return the episodes of open groups that have finished, and those that were dropped for the next
        batch, which a checkpoint holds too. Groups that have completed are in the order of completion."""
        groups = {number: self._groups[number] for number in self._book.completed} | self._groups
        return [Done(*episode) for group in groups.values() for episode in group.finished.items()]

    def restore(self, state: Mapping[str, Any], kept: Iterable[Done] = ()) -> None:
        """Continue from a checkpoint's state, in which `ledger` is missing if it was colocated.

        kept: the checkpoint's episodes. Those that failed are played again: a tool may have been broken. So
        are, if max_staleness was larger, those that are too old now, when they may be.
        Raises ConfigError if open groups have another size now, or the cursor does not fit the data.
        """
        self._cursor.restore(state["cursor"])
        self._behind = self._cursor.state()
        saved = state.get("ledger", {})
        counts = int(state["iteration"]), saved.get("drops", 0), saved.get("extra", 0)
        self._book = Ledger(self._terms, *counts)
        if not saved:
            return
        self._trained = Lengths(**saved["lengths"])
        check_open(saved, self._terms.tasks, self._terms.samples)
        if saved["first"] == saved["next"]:  # no group is open
            return
        self._ahead = {int(number): Lengths(**of_one) for number, of_one in saved["trained"].items()}
        self._open_again(saved)
        used = {number: self._used(place) for place, number in enumerate(self._book.open)}
        for done in kept:
            group = done.number // self._terms.samples
            if done.trajectory.outcome in FAILED and not done.trajectory.overlong_prompt:
                continue
            if group in used and not self._is_too_old(done.trajectory, used[group]):
                self.finish(done.number, done.trajectory)
            elif group in self._groups and group not in used:  # dropped
                self._groups[group].finished[done.number] = done.trajectory

    def continues(self, number: int, versions: Collection[int]) -> bool:
        """Return whether an episode of a checkpoint may go on from tokens of these versions."""
        group = number // self._terms.samples
        if group not in self._book.open or number in self._groups[group].finished or not versions:
            return False
        used = self._used(list(self._book.open).index(group))
        return self._terms.order == "completion" or used - min(versions) <= self._terms.max_staleness

    def _open_again(self, saved: Mapping[str, Any]) -> None:
        """Admit the groups that are open, or were dropped for the next batch, in a checkpoint's ledger."""
        tasks, book = self._terms.tasks, self._book
        drawn = {int(number): (place[0], place[1]) for number, place in saved.get("drawn", {}).items()}
        book.next = self._still_admitted(saved["next"])
        rounds = [list(numbers) for numbers in saved.get("rounds", ())]
        # Dropped groups that are not admitted now are not dropped either, and then fewer groups are admitted.
        while late := [n for numbers in rounds for n in numbers if n >= book.next]:
            book.drops -= len(late)
            rounds = [left for numbers in rounds if (left := [n for n in numbers if n < book.next])]
            book.next = self._still_admitted(book.next)
        book.rounds = rounds
        book.extra -= sum(n >= book.next and place >= tasks for n, (_, place) in drawn.items())
        dropped = {number for numbers in rounds for number in numbers}
        numbers = range(saved["first"], book.next)
        for number, task in zip(numbers, self._cursor.take(len(numbers)), strict=True):
            if number not in self._ahead:
                of_one = Admitted(number, *drawn.get(number, divmod(number, tasks)))
                self._groups[number] = Group(task, of_one)
        book.open = dict.fromkeys(number for number in self._groups if number not in dropped)

    def _still_admitted(self, count: int) -> int:
        """Return how many of the `count` groups that were admitted are so now, before the ledger's iteration.

        The others, if max_staleness was larger, are admitted again later.
        """
        if self._terms.order == "completion":
            return count
        return max(min(count, self._book.limit(self._book.iteration)), max(self._ahead, default=-1) + 1)

    def _used(self, place: int) -> int:
        """Return the iteration that will train on an open group, by its place among them."""
        return self._book.iteration + place // self._terms.tasks

    def _is_too_old(self, trajectory: Trajectory, iteration: int) -> bool:
        """Return whether a trajectory that `iteration` will use exceeds max_staleness."""
        if self._terms.order == "completion" or not trajectory.turns:
            return False
        return iteration - trajectory.turns[0].policy_version > self._terms.max_staleness

    def _assigned(self, admitted: Sequence[Admitted]) -> list[Assignment]:
        """Return the episodes of groups that were admitted, with the cursor's next tasks."""
        tasks = self._cursor.take(len(admitted))
        new = [Group(task, drawn) for task, drawn in zip(tasks, admitted, strict=True)]
        self._groups |= {group.drawn.number: group for group in new}
        return [episode for group in new for episode in self._episodes(group)]

    def _episodes(self, group: Group) -> list[Assignment]:
        """Return the episodes of a group. Their seeds are those of a colocated run."""
        number, iteration, place = group.drawn
        samples, seed = self._terms.samples, self._seed * 1_000_003 + iteration
        return [
            Assignment(number * samples + n, group.task, place, seed, place * samples + n, *self._sampling)
            for n in range(samples)
        ]

    def _close(self, closed: Mapping[int, Lengths]) -> None:
        """Move the oldest open group's cursor past the groups that were trained or dropped."""
        self._trained = sum(closed.values(), self._trained)
        self._ahead.update(closed)
        first = next(iter(self._book.open), self._book.next)
        passed = [number for number in self._ahead if number < first]
        self._behind = self._cursor.after(self._behind, len(passed))
        for number in passed:
            del self._ahead[number]


def _summaries(groups: Iterable[Group]) -> list[Summary]:
    """Return all histories of completed groups, which are numbered in this order."""
    return [
        replace(history, group=place).summary
        for place, group in enumerate(groups)
        for _, trajectory in sorted(group.finished.items())
        for history in trajectory.histories()
    ]
