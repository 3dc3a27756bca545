"""Groups of the episodes of one task: what the trainer keeps of them, and how they are sampled."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from megatron_stppo.base.types import Summary, Task, Trajectory
from megatron_stppo.data.ledger import Admitted
from megatron_stppo.replicas.wire.messages import Assignment


@dataclass(frozen=True)
class Sampling:
    """How the episodes of a run are sampled: its seed, and the engine's settings."""

    seed: int = 0
    temperature: float = 1.0
    top_p: float = 1.0


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


def episodes_of(group: Group, samples: int, sampling: Sampling) -> list[Assignment]:
    """Return the episodes of a group. Their seeds are those of a colocated run."""
    number, iteration, place = group.drawn
    return [
        Assignment(
            number * samples + sample,
            group.task,
            place,
            sampling.seed * 1_000_003 + iteration,
            place * samples + sample,
            sampling.temperature,
            sampling.top_p,
        )
        for sample in range(samples)
    ]


def summaries(groups: Iterable[Group]) -> list[Summary]:
    """Return all histories of completed groups, which are numbered in this order."""
    return [
        replace(history, group=place).summary
        for place, group in enumerate(groups)
        for _, trajectory in sorted(group.finished.items())
        for history in trajectory.histories()
    ]
