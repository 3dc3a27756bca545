"""The ledger of a run's episodes: admitted, finished, trained.

Tasks are drawn in the cursor's order, each for a group of `samples` episodes. Groups are numbered in the
order in which they are admitted; a batch is `tasks` groups. Nothing that was admitted is thrown away: every
group is trained on exactly once, after any number of interruptions.

Admission (the rule of AReaL, arXiv 2505.24298): while iteration v collects its batch, groups below
(max_staleness + v + 1) * tasks may have been admitted. In the order of admission the batch of iteration v
was admitted at version v - max_staleness or later, so none of its tokens is older. In the order of completion
the same number of groups is open, but a slow one may become older: every batch has room for exactly the
groups of one iteration, so none can pass another one that must not become older.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from megatron_stppo.data.tasks import TaskCursor
from megatron_stppo.serving.lengths import Lengths
from megatron_stppo.serving.messages import Assignment, Done
from megatron_stppo.types import Task, Trajectory
from megatron_stppo.validation.serving import check_open

Order = Literal["admission", "completion"]


@dataclass(frozen=True)
class Terms:
    """What decides which episodes are admitted, and which are in a batch.

    Example: Terms(tasks=8, samples=4, max_staleness=1) has batches of 8 groups of 4 episodes; iteration 0
    admits 16 groups.
    """

    tasks: int
    samples: int
    max_staleness: int
    order: Order = "admission"
    seed: int = 0
    temperature: float = 1.0
    top_p: float = 1.0

    def seed_of(self, iteration: int) -> int:
        return self.seed * 1_000_003 + iteration


@dataclass
class _Group:
    task: Task
    finished: dict[int, Trajectory]  # by episode number


class Ledger:
    """Admits episodes, stores the finished ones, and takes batches from them. Not collective: on rank 0.

    Example, with batches of one group of one episode and max_staleness=1: admit(0) returns the episodes 0 and
    1; after finish(1, b) batch() is None; after finish(0, a) it is [a].
    """

    def __init__(self, cursor: TaskCursor, terms: Terms, recorded: Sequence[Sequence[int]] = ()) -> None:
        """cursor: at its start; it is moved. recorded: the groups of each batch, to repeat a run."""
        self._cursor, self._terms = cursor, terms
        self._open: dict[int, _Group] = {}  # admitted and not trained, by number, ascending
        self._next = 0  # the number of the next group
        self._completed: list[int] = []  # open groups whose episodes have all finished, in that order
        # The cursor before the oldest open group, and the trained groups that follow that group.
        self._behind = cursor.state()
        self._ahead: dict[int, Lengths] = {}
        self._trained = Lengths()  # of all episodes that were trained on
        self._recorded = deque(recorded)
        self.taken: list[int] = []  # the groups of the last batch

    def admit(self, iteration: int) -> list[Assignment]:
        """Admit the groups that iteration `iteration` allows, and return their episodes."""
        limit = (self._terms.max_staleness + iteration + 1) * self._terms.tasks
        new = range(self._next, max(self._next, limit))
        for number, task in zip(new, self._cursor.take(len(new)), strict=True):
            self._open[number] = _Group(task, {})
        self._next = new.stop
        return [episode for number in new for episode in self._episodes(number)]

    def unfinished(self) -> list[Assignment]:
        """Return the admitted episodes that have not finished; they are played again after a resume."""
        every = (episode for number in self._open for episode in self._episodes(number))
        return [e for e in every if e.number not in self._open[e.number // self._terms.samples].finished]

    def finish(self, number: int, trajectory: Trajectory) -> bool:
        """Store a finished episode. Return False if it is not open or has finished before."""
        group = self._open.get(number // self._terms.samples)
        if group is None or number in group.finished:
            return False
        # The task is ours: a replica might return another one.
        group.finished[number] = replace(trajectory, task=group.task)
        if len(group.finished) == self._terms.samples:
            self._completed.append(number // self._terms.samples)
        return True

    def batch(self) -> list[Trajectory] | None:
        """Take the trajectories of the next batch, group by group; None if they have not all finished."""
        chosen = self._chosen()
        if not set(chosen) <= set(self._completed):
            return None
        taken = [self._open.pop(number) for number in chosen]
        self._completed = [number for number in self._completed if number not in chosen]
        self.taken = chosen
        if self._recorded:
            self._recorded.popleft()
        self._close({n: Lengths.of(g.finished.values()) for n, g in zip(chosen, taken, strict=True)})
        return [
            replace(trajectory, group=place)
            for place, group in enumerate(taken)
            for _, trajectory in sorted(group.finished.items())
        ]

    def missing(self) -> int:
        """Return how many episodes of the next batch have not finished."""
        chosen = self._chosen()
        return sum(self._terms.samples - len(self._open[number].finished) for number in chosen)

    @property
    def ready(self) -> int:
        """The number of episodes that have finished and are not trained."""
        return sum(len(group.finished) for group in self._open.values())

    def bias(self) -> dict[str, float]:
        """Return the metrics of what order=completion prefers, by name; {} in the order of admission.

        overtaken: open groups that were admitted before a group of the last batch.
        length_bias: the mean response length of the episodes that were trained on, minus that of the episodes
        that order=admission would have trained on by now, as far as they have finished. In tokens.
        Example: in batches of one group of one episode, group 1 of 10 tokens was trained on and group 0 of
        50 tokens has finished after it: overtaken is 1 and length_bias -40.
        """
        if self._terms.order == "admission":
            return {}
        count = next(iter(self._open), self._next) + len(self._ahead)  # groups that were trained
        early = sum((one for number, one in self._ahead.items() if number >= count), Lengths())
        slow = [group for number, group in self._open.items() if number < count]
        instead = sum((Lengths.of(group.finished.values()) for group in slow), Lengths())
        return {
            "overtaken": sum(number < max(self.taken, default=0) for number in self._open),
            "length_bias": self._trained.mean - (self._trained - early + instead).mean,
        }

    def state(self) -> dict[str, Any]:
        """Return a checkpoint's state, JSON-serialisable. `cursor` is where a colocated run continues."""
        first = next(iter(self._open), self._next)
        return {
            "cursor": dict(self._behind),
            "ledger": {
                "tasks": self._terms.tasks,
                "samples": self._terms.samples,
                "first": first,
                "next": self._next,
                "trained": {str(number): asdict(lengths) for number, lengths in self._ahead.items()},
                "lengths": asdict(self._trained),
            },
        }

    def kept(self) -> list[Done]:
        """Return the episodes that have finished and are not trained on, which a checkpoint holds too."""
        return [Done(*one) for group in self._open.values() for one in group.finished.items()]

    def restore(self, state: Mapping[str, Any], kept: Iterable[Done] = ()) -> None:
        """Continue from a checkpoint's state, in which `ledger` is missing if it was colocated.

        kept: the checkpoint's episodes. If max_staleness was larger, those that are too old now are played
        again, when they may be.
        Raises ConfigError if open groups have another size now, or the cursor does not fit the data.
        """
        self._cursor.restore(state["cursor"])
        self._behind = self._cursor.state()
        self._next = int(state["iteration"]) * self._terms.tasks
        book = state.get("ledger")
        if book is None:
            return
        self._trained = Lengths(**book["lengths"])
        check_open(book, self._terms.tasks, self._terms.samples)
        if book["first"] == book["next"]:  # no group is open
            return
        iteration = int(state["iteration"])
        self._ahead = {int(number): Lengths(**one) for number, one in book["trained"].items()}
        self._next = self._still_admitted(book["next"], iteration)
        numbers = range(book["first"], self._next)
        for number, task in zip(numbers, self._cursor.take(len(numbers)), strict=True):
            if number not in self._ahead:
                self._open[number] = _Group(task, {})
        used = {number: iteration + place // self._terms.tasks for place, number in enumerate(self._open)}
        for done in kept:
            group = done.number // self._terms.samples
            if group in used and not self._is_too_old(done.trajectory, used[group]):
                self.finish(done.number, done.trajectory)

    def _still_admitted(self, count: int, iteration: int) -> int:
        """Return how many of the `count` groups that were admitted are so now, before `iteration`.

        The others, if max_staleness was larger, are admitted again later.
        """
        if self._terms.order == "completion":
            return count
        limit = (self._terms.max_staleness + iteration + 1) * self._terms.tasks
        return max(min(count, limit), max(self._ahead, default=-1) + 1)

    def _is_too_old(self, trajectory: Trajectory, iteration: int) -> bool:
        """Return whether a trajectory that `iteration` will use exceeds max_staleness."""
        if self._terms.order == "completion" or not trajectory.turns:
            return False
        return iteration - trajectory.turns[0].policy_version > self._terms.max_staleness

    def _chosen(self) -> list[int]:
        """Return the groups of the next batch, in the order of the batch."""
        if self._recorded:
            return list(self._recorded[0])
        wanted = self._terms.tasks
        if self._terms.order == "admission":
            return list(self._open)[:wanted]
        running = (number for number in self._open if number not in self._completed)
        return [*self._completed, *running][:wanted]

    def _close(self, trained: Mapping[int, Lengths]) -> None:
        """Move the oldest open group's cursor past the groups that were trained."""
        self._trained = sum(trained.values(), self._trained)
        self._ahead.update(trained)
        first = next(iter(self._open), self._next)
        passed = [number for number in self._ahead if number < first]
        self._behind = self._cursor.after(self._behind, len(passed))
        for number in passed:
            del self._ahead[number]

    def _episodes(self, number: int) -> list[Assignment]:
        """Return the episodes of an open group. Their seeds are those of a colocated run."""
        terms, task = self._terms, self._open[number].task
        iteration, group = divmod(number, terms.tasks)
        return [
            Assignment(
                number * terms.samples + sample,
                task,
                group,
                terms.seed_of(iteration),
                group * terms.samples + sample,
                terms.temperature,
                terms.top_p,
            )
            for sample in range(terms.samples)
        ]
