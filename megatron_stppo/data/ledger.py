"""The ledger of a run's groups: which are admitted, which dynamic sampling drops, which make the next batch.

A group is the episodes of one task. Groups are numbered in the order in which they are admitted; a batch is
`tasks` groups. Every group that was admitted is trained on exactly once, or dropped by dynamic sampling.

Three kinds of runs use this class: colocated training, with staleness 0 (training/rollouts.py);
asynchronous training (replicas/trainer/ledger.py); and its simulation (plan/simulation/asynchronous.py).

Admission (the rule of AReaL, arXiv 2505.24298): while iteration v collects its batch, groups below
(max_staleness + v + 1) * tasks may have been admitted. In the order of admission the batch of iteration v
was admitted at version v - max_staleness or later, so none of its tokens is older. In the order of completion
the same number of groups is open, but a slow one may become older: a batch has room for exactly the groups of
one iteration, so a group that is taken early leaves a slow one for a later batch.

Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): a group of episodes without variance gives a
group-relative advantage of 0. When all groups of the next batch have completed, those without variance are
dropped. The groups that follow take their places, and as many new ones are admitted, so that the number of
open groups stays. This happens at most `resample` times per batch. A dropped group makes the following ones
be trained on earlier, never later, so the bound on the staleness holds.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from megatron_stppo.algorithm.baselines import group_relative
from megatron_stppo.base.types import FAILED, Summary

Order = Literal["admission", "completion"]


@dataclass(frozen=True)
class Terms:
    """What decides which groups are admitted, and which are in a batch.

    Example: Terms(tasks=8, samples=4, max_staleness=1) has batches of 8 groups of 4 episodes; iteration 0
    admits 16 groups.
    """

    tasks: int
    samples: int = 1
    max_staleness: int = 0
    order: Order = "admission"
    resample: int = 0  # rounds per batch in which groups without variance are replaced


class Admitted(NamedTuple):
    """A group that is admitted, and the iteration and place that decide its random numbers.

    They are those of the batch that the group would be in if none was dropped; for one in the place of a
    dropped group, of that batch, with a place after its other groups.
    """

    number: int
    iteration: int
    place: int


@dataclass(frozen=True)
class Taken:
    """The groups of a batch, and those that were dropped for it, round by round.

    Example: Taken([0, 2], [[1]]): group 1 had no variance, and group 2 took its place.
    """

    groups: list[int]
    dropped: list[list[int]] = field(default_factory=list)


class Ledger:
    """Decides by the numbers of groups; whoever uses it has their episodes.

    Example, with batches of one group and max_staleness=1: admit(0) returns the groups 0 and 1; after
    complete(1) take() is None; after complete(0) it is Taken([0]).
    """

    def __init__(self, terms: Terms, iteration: int = 0, drops: int = 0, extra: int = 0) -> None:
        """Begin with an iteration, before which all admitted groups were trained on or dropped.

        drops: groups that were dropped before. extra: of the admitted groups, those that were admitted in the
        place of dropped ones.
        """
        self.terms, self.iteration, self.drops, self.extra = terms, iteration, drops, extra
        self.next = iteration * terms.tasks + drops  # the number of the next group
        self.open: dict[int, None] = {}  # admitted, not trained on and not dropped, ascending
        self.completed: list[int] = []  # open groups whose episodes have all finished, in that order
        self.rounds: list[list[int]] = []  # groups that were dropped for the batch of this iteration

    def admit(self, iteration: int) -> list[Admitted]:
        """Admit the groups that `iteration` allows, which collects its batch now, and return them."""
        self.iteration = iteration
        first = self.next - self.extra  # groups that were admitted in the order of the batches
        count = max(0, self.limit(iteration) - self.next)
        return self._admit([divmod(first + i, self.terms.tasks) for i in range(count)])

    def complete(self, number: int) -> None:
        """Note that all episodes of an open group have finished."""
        self.completed.append(number)

    def droppable(self) -> list[int]:
        """Return the groups of the next batch, if all have completed and a round is left; else []."""
        chosen = self.next_batch()
        return chosen if len(self.rounds) < self.terms.resample and self._have_completed(chosen) else []

    def replace(self, dropped: Sequence[int]) -> list[Admitted]:
        """Drop groups without variance, as a round, and admit as many. Return these.

        Call it with those of `droppable`, until it returns [], before `take`.
        """
        if not dropped:
            return []
        place = self.terms.tasks + sum(len(of_round) for of_round in self.rounds)
        self._close(dropped)
        self.rounds.append(list(dropped))
        self.drops += len(dropped)
        self.extra += len(dropped)
        return self._admit([(self.iteration, place + i) for i in range(len(dropped))])

    def take(self) -> Taken | None:
        """Take the groups of the next batch; None if they have not all completed."""
        chosen = self.next_batch()
        assert len(chosen) == self.terms.tasks, "admit the groups of the iteration first"
        if not self._have_completed(chosen):
            return None
        self._close(chosen)
        taken, self.rounds = Taken(chosen, self.rounds), []
        return taken

    def put_back(self, taken: Taken) -> None:
        """Open the groups of the last batch again, and those that were dropped for it."""
        dropped = [number for of_round in taken.dropped for number in of_round]
        self.open = dict.fromkeys(sorted([*dropped, *taken.groups, *self.open]))
        self.completed = [*dropped, *taken.groups, *self.completed]
        self.drops -= len(dropped)

    def next_batch(self) -> list[int]:
        """Return the groups of the next batch, in the order of the batch."""
        if self.terms.order == "admission":
            return list(self.open)[: self.terms.tasks]
        running = (number for number in self.open if number not in self.completed)
        return [*self.completed, *running][: self.terms.tasks]

    def limit(self, iteration: int) -> int:
        """Return how many groups may have been admitted while `iteration` collects its batch."""
        return (self.terms.max_staleness + iteration + 1) * self.terms.tasks + self.drops

    def _have_completed(self, numbers: Iterable[int]) -> bool:
        return set(numbers) <= set(self.completed)

    def _close(self, numbers: Collection[int]) -> None:
        for number in numbers:
            del self.open[number]
        self.completed = [number for number in self.completed if number not in numbers]

    def _admit(self, drawn: Sequence[tuple[int, int]]) -> list[Admitted]:
        new = [Admitted(number, *one) for number, one in enumerate(drawn, self.next)]
        self.open.update(dict.fromkeys(one.number for one in new))
        self.next += len(new)
        return new


def without_variance(played: Sequence[Summary]) -> set[int]:
    """Return the groups in which the advantage of every episode is 0, by `group_relative`.

    These are groups whose live episodes have equal outcomes, and those with at most one live episode.

    played: all histories of the groups' episodes.
    Example: two episodes each of groups 0, 1 and 2, with the rewards (0, 1), (1, 1) and (0, failed): {1, 2}.
    """
    if not played:
        return set()
    # float32, as the rewards of a batch
    reward_S = torch.tensor([turn.reward for t in played for turn in t.turns], dtype=torch.float32).double()
    of_S = torch.tensor([n for n, t in enumerate(played) for _ in t.turns], dtype=torch.int64)
    advantage_N = group_relative(
        torch.zeros(len(played), dtype=torch.float64).index_add(0, of_S, reward_S),
        torch.tensor([t.group for t in played]),
        torch.tensor([t.outcome not in FAILED and bool(t.turns) for t in played]),
        normalised=False,
        first_N=torch.tensor([t.branch == 0 for t in played]),
    )
    varied = {t.group for t, advantage in zip(played, advantage_N.tolist(), strict=True) if advantage != 0}
    return {t.group for t in played} - varied
