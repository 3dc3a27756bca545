"""What the ledger counts: groups of the episodes of one task, their lengths, and the terms of admission."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from megatron_stppo.base.types import Summary, Task, Trajectory
from megatron_stppo.replicas.wire.messages import Assignment

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
    resample: int = 0  # rounds per batch in which groups without variance are replaced


@dataclass(frozen=True)
class Taken:
    """The groups of a batch, and those that were dropped for it, round by round.

    Example: Taken([0, 2], [[1]]): group 1 had no variance, and group 2 took its place.
    """

    groups: list[int]
    dropped: list[list[int]] = field(default_factory=list)


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

    Example: Group(task, (3, 1)) gets the random numbers of the second group of iteration 3.
    """

    task: Task
    # Iteration and place that decide the random numbers: of the batch that the group would be in if none was
    # dropped; for one in the place of a dropped group, of that batch, with a place after its other groups.
    drawn: tuple[int, int]
    finished: dict[int, Trajectory] = field(default_factory=dict)  # by episode number


def episodes_of(group: Group, number: int, terms: Terms) -> list[Assignment]:
    """Return the episodes of the group `number`. Their seeds are those of a colocated run."""
    iteration, place = group.drawn
    return [
        Assignment(
            number * terms.samples + sample,
            group.task,
            place,
            terms.seed * 1_000_003 + iteration,
            place * terms.samples + sample,
            terms.temperature,
            terms.top_p,
        )
        for sample in range(terms.samples)
    ]


def summaries(groups: Iterable[Group]) -> list[Summary]:
    """Return all histories of completed groups, which are numbered in this order."""
    return [
        replace(history, group=place).summary
        for place, group in enumerate(groups)
        for _, trajectory in sorted(group.finished.items())
        for history in trajectory.histories()
    ]
