"""Response lengths of episodes, with which the ledger reports what order=completion prefers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_stppo.types import Trajectory


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
