"""The ledger of a run's episodes: admitted, finished, trained or dropped.

Tasks are drawn in the cursor's order, each for a group of `samples` episodes. Groups are numbered in the
order in which they are admitted; a batch is `tasks` groups. Nothing that was admitted is thrown away: every
group is trained on exactly once, after any number of interruptions, or is dropped by dynamic sampling.

Admission (the rule of AReaL, arXiv 2505.24298): while iteration v collects its batch, groups below
(max_staleness + v + 1) * tasks may have been admitted. In the order of admission the batch of iteration v
was admitted at version v - max_staleness or later, so none of its tokens is older. In the order of completion
the same number of groups is open, but a slow one may become older: a batch has room for exactly the groups of
one iteration, so a group that is taken early leaves a slow one for a later batch.

Dynamic sampling (resampling.py): when all groups of the next batch have completed, those without variance are
dropped. The groups that follow take their places, and as many new ones are admitted, so that the number of
open groups stays. This happens at most `resample` times per batch. A dropped group makes the following ones
be trained on earlier, never later, so the bound on the staleness holds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from megatron_stppo.base.types import FAILED, Summary, Trajectory
from megatron_stppo.data.tasks import TaskCursor
from megatron_stppo.data.variance import without_variance
from megatron_stppo.replicas.trainer.groups import Group, Lengths, Taken, Terms, episodes_of, summaries
from megatron_stppo.replicas.wire.episodes import Done
from megatron_stppo.replicas.wire.messages import Assignment
from megatron_stppo.validation.serving import check_open


class Ledger:
    """Admits episodes, stores the finished ones, and takes batches from them. Not collective: on rank 0.

    Example, with batches of one group of one episode and max_staleness=1: admit(0) returns the episodes 0 and
    1; after finish(1, b) batch() is None; after finish(0, a) it is [a].
    """

    def __init__(self, cursor: TaskCursor, terms: Terms) -> None:
        """cursor: at its start; it is moved."""
        self._cursor, self._terms = cursor, terms
        self._open: dict[int, Group] = {}  # admitted and not trained, by number, ascending
        self._next = 0  # the number of the next group
        self._completed: list[int] = []  # open groups whose episodes have all finished, in that order
        self._iteration = 0  # that collects its batch
        self._rounds: list[list[int]] = []  # of that batch: the groups that were dropped
        self._dropped: dict[int, Group] = {}  # the same groups
        self._drops = 0  # groups that were ever dropped
        self._extra = 0  # groups that were admitted in the place of dropped ones
        # The cursor before the oldest open group, and the trained groups that follow that group.
        self._behind = cursor.state()
        self._ahead: dict[int, Lengths] = {}
        self._trained = Lengths()  # of all episodes that were trained on
        self.taken = Taken([])  # of the last batch
        self.dropped: list[Summary] = []  # the episodes that were dropped for it; each group has a number
        self._before = dict[int, Group](), 0, self._behind, self._ahead, self._trained  # for put_back

    def admit(self, iteration: int) -> list[Assignment]:
        """Admit the groups that iteration `iteration` allows, and return their episodes."""
        self._iteration = iteration
        first = self._next - self._extra  # groups that were admitted in the order of the batches
        count = max(0, self._limit(iteration) - self._next)
        return self._admit([divmod(first + i, self._terms.tasks) for i in range(count)])

    def resample(self) -> list[Assignment]:
        """Drop the groups without variance of the next batch, if all its groups have completed.

        Return the episodes of the groups that are admitted in their place; [] if none is dropped. Call it
        again until then, before `batch`.
        """
        flat = self._without_variance()
        if not flat:
            return []
        place = self._terms.tasks + len(self._dropped)
        self._dropped |= {number: self._open.pop(number) for number in flat}
        self._completed = [number for number in self._completed if number not in flat]
        self._rounds.append(flat)
        self._drops += len(flat)
        self._extra += len(flat)
        return self._admit([(self._iteration, place + i) for i in range(len(flat))])

    def unfinished(self) -> list[Assignment]:
        """Return the admitted episodes that have not finished; they are played again after a resume."""
        every = (e for number, group in self._open.items() for e in episodes_of(group, number, self._terms))
        return [e for e in every if e.number not in self._open[e.number // self._terms.samples].finished]

    def finish(self, number: int, trajectory: Trajectory) -> bool:
        """Store a finished episode. Return False if it is not open or has finished before."""
        group = self._open.get(number // self._terms.samples)
        if group is None or number in group.finished:
            return False
        # The task is the trainer's own copy: a replica might return another one.
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
        self.taken = Taken(chosen, self._rounds)
        self.dropped = summaries(group for _, group in sorted(self._dropped.items()))
        closed = self._dropped | dict(zip(chosen, taken, strict=True))
        self._before = closed, len(self._dropped), self._behind, dict(self._ahead), self._trained
        self._rounds, self._dropped = [], {}
        self._close({number: Lengths.of(group.finished.values()) for number, group in closed.items()})
        return [
            replace(trajectory, group=place)
            for place, group in enumerate(taken)
            for _, trajectory in sorted(group.finished.items())
        ]

    def put_back(self) -> None:
        """Open the groups of the last batch again, and those that were dropped for it: too many episodes have
        failed. For a checkpoint; then the run ends."""
        groups, dropped, self._behind, self._ahead, self._trained = self._before
        self._open = dict(sorted((groups | self._open).items()))
        self._completed = [*groups, *self._completed]
        self._drops -= dropped

    @property
    def settled(self) -> bool:
        """Whether all admitted episodes have finished."""
        return len(self._completed) == len(self._open)

    @property
    def ready(self) -> int:
        """The number of episodes that have finished and are not trained."""
        return sum(len(group.finished) for group in self._open.values())

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
        count = next(iter(self._open), self._next) + len(self._ahead)  # groups that are closed
        early = sum((one for number, one in self._ahead.items() if number >= count), Lengths())
        slow = [group for number, group in self._open.items() if number < count]
        instead = sum((Lengths.of(group.finished.values()) for group in slow), Lengths())
        return {
            "overtaken": sum(number < max(self.taken.groups, default=0) for number in self._open),
            "length_bias": self._trained.mean - (self._trained - early + instead).mean,
        }

    def state(self) -> dict[str, Any]:
        """Return a checkpoint's state, JSON-serialisable. `cursor` is where a colocated run continues."""
        tasks, groups = self._terms.tasks, self._open | self._dropped
        return {
            "cursor": dict(self._behind),
            "ledger": {
                "tasks": tasks,
                "samples": self._terms.samples,
                "first": min(groups, default=self._next),
                "next": self._next,
                "trained": {str(number): asdict(lengths) for number, lengths in self._ahead.items()},
                "lengths": asdict(self._trained),
                "drops": self._drops,
                "extra": self._extra,
                "rounds": self._rounds,
                # where it is not that of the number
                "drawn": {str(n): g.drawn for n, g in groups.items() if g.drawn != divmod(n, tasks)},
            },
        }

    def kept(self) -> list[Done]:
        """Return the episodes of open groups that have finished, and those that were dropped for the next
        batch, which a checkpoint holds too. Groups that have completed are in the order of completion."""
        groups = {number: self._open[number] for number in self._completed} | self._open | self._dropped
        return [Done(*one) for group in groups.values() for one in group.finished.items()]

    def restore(self, state: Mapping[str, Any], kept: Iterable[Done] = ()) -> None:
        """Continue from a checkpoint's state, in which `ledger` is missing if it was colocated.

        kept: the checkpoint's episodes. Those that failed are played again: a tool may have been broken. So
        are, if max_staleness was larger, those that are too old now, when they may be.
        Raises ConfigError if open groups have another size now, or the cursor does not fit the data.
        """
        self._cursor.restore(state["cursor"])
        self._behind = self._cursor.state()
        book = state.get("ledger", {})
        self._iteration, self._drops = int(state["iteration"]), book.get("drops", 0)
        self._next, self._extra = self._iteration * self._terms.tasks + self._drops, book.get("extra", 0)
        if not book:
            return
        self._trained = Lengths(**book["lengths"])
        check_open(book, self._terms.tasks, self._terms.samples)
        if book["first"] == book["next"]:  # no group is open
            return
        self._ahead = {int(number): Lengths(**one) for number, one in book["trained"].items()}
        self._open_again(book)
        used = {n: self._iteration + place // self._terms.tasks for place, n in enumerate(self._open)}
        for done in kept:
            group = done.number // self._terms.samples
            if done.trajectory.outcome in FAILED and not done.trajectory.overlong_prompt:
                continue
            if group in self._dropped:
                self._dropped[group].finished[done.number] = done.trajectory
            elif group in used and not self._is_too_old(done.trajectory, used[group]):
                self.finish(done.number, done.trajectory)

    def continues(self, number: int, versions: Collection[int]) -> bool:
        """Return whether an episode of a checkpoint may go on from tokens of these versions."""
        group = number // self._terms.samples
        if group not in self._open or number in self._open[group].finished or not versions:
            return False
        used = self._iteration + list(self._open).index(group) // self._terms.tasks
        return self._terms.order == "completion" or used - min(versions) <= self._terms.max_staleness

    def _open_again(self, book: Mapping[str, Any]) -> None:
        """Admit the groups that are open, or were dropped for the next batch, in a checkpoint's ledger."""
        tasks = self._terms.tasks
        drawn = {int(number): (place[0], place[1]) for number, place in book.get("drawn", {}).items()}
        self._next = self._still_admitted(book["next"], self._iteration)
        self._rounds = [list(numbers) for numbers in book.get("rounds", ())]
        # Dropped groups that are not admitted now are not dropped either, and then fewer groups are admitted.
        while late := [n for numbers in self._rounds for n in numbers if n >= self._next]:
            self._drops -= len(late)
            kept = [[n for n in numbers if n < self._next] for numbers in self._rounds]
            self._rounds = [numbers for numbers in kept if numbers]
            self._next = self._still_admitted(self._next, self._iteration)
        self._extra -= sum(n >= self._next and place >= tasks for n, (_, place) in drawn.items())
        dropped = {number for numbers in self._rounds for number in numbers}
        numbers = range(book["first"], self._next)
        for number, task in zip(numbers, self._cursor.take(len(numbers)), strict=True):
            if number not in self._ahead:
                groups = self._dropped if number in dropped else self._open
                groups[number] = Group(task, drawn.get(number, divmod(number, tasks)))

    def _still_admitted(self, count: int, iteration: int) -> int:
        """Return how many of the `count` groups that were admitted are so now, before `iteration`.

        The others, if max_staleness was larger, are admitted again later.
        """
        if self._terms.order == "completion":
            return count
        return max(min(count, self._limit(iteration)), max(self._ahead, default=-1) + 1)

    def _limit(self, iteration: int) -> int:
        """Return how many groups may have been admitted while `iteration` collects its batch."""
        return (self._terms.max_staleness + iteration + 1) * self._terms.tasks + self._drops

    def _is_too_old(self, trajectory: Trajectory, iteration: int) -> bool:
        """Return whether a trajectory that `iteration` will use exceeds max_staleness."""
        if self._terms.order == "completion" or not trajectory.turns:
            return False
        return iteration - trajectory.turns[0].policy_version > self._terms.max_staleness

    def _chosen(self) -> list[int]:
        """Return the groups of the next batch, in the order of the batch."""
        wanted = self._terms.tasks
        if self._terms.order == "admission":
            return list(self._open)[:wanted]
        running = (number for number in self._open if number not in self._completed)
        return [*self._completed, *running][:wanted]

    def _without_variance(self) -> list[int]:
        """Return the groups to drop now, in the order of the batch."""
        chosen = self._chosen()
        if len(self._rounds) >= self._terms.resample or not set(chosen) <= set(self._completed):
            return []
        places = without_variance(summaries(self._open[number] for number in chosen))
        return [chosen[place] for place in sorted(places)]

    def _admit(self, drawn: Sequence[tuple[int, int]]) -> list[Assignment]:
        """Admit groups of the next tasks, with random numbers for `drawn`. Return their episodes."""
        new = range(self._next, self._next + len(drawn))
        for number, task, of_one in zip(new, self._cursor.take(len(new)), drawn, strict=True):
            self._open[number] = Group(task, of_one)
        self._next = new.stop
        return [e for number in new for e in episodes_of(self._open[number], number, self._terms)]

    def _close(self, closed: Mapping[int, Lengths]) -> None:
        """Move the oldest open group's cursor past the groups that were trained or dropped."""
        self._trained = sum(closed.values(), self._trained)
        self._ahead.update(closed)
        first = next(iter(self._open), self._next)
        passed = [number for number in self._ahead if number < first]
        self._behind = self._cursor.after(self._behind, len(passed))
        for number in passed:
            del self._ahead[number]
