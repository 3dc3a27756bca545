"""The result of a simulation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Forecast:
    """Means over the measured iterations, in simulated time. Seconds are per iteration.

    The shares of a role do not sum to 1: the rest is work.
    """

    iteration_seconds: float
    tokens_per_second: float  # tokens of the trajectories that are trained on, prompts included
    batch_tokens: float  # per iteration
    waiting: float  # seconds that the trainer waits for a complete batch or, with `complete`, all episodes
    training: float  # seconds of score, advantage and update
    publishing: float  # the other seconds, from the last update until all replicas have the weights
    replica_idle: float  # share of time without a sequence to run, mean over replicas
    replica_paused: float  # share of time that replicas wait for weights, mean over replicas
    staleness: Mapping[int, float]  # {versions: share of the trajectories}
    in_flight: float  # episodes in progress per replica, mean over time
    calls_waiting: float  # calls of tools that wait for a place (environment.concurrency), per replica
    buffered: float  # complete episodes that wait for their batch, mean over time
    recomputed: float  # tokens per iteration whose keys and values are computed again because of updates
    running: float  # sequences per engine step
    durations: tuple[float, ...] = field(repr=False)  # seconds of each measured iteration

    @property
    def trainer_idle(self) -> float:
        """Share of time that the trainer waits for episodes."""
        return self.waiting / self.iteration_seconds

    @property
    def staleness_mean(self) -> float:
        return sum(versions * share for versions, share in self.staleness.items())

    @property
    def staleness_max(self) -> int:
        return max(self.staleness)


def shares(counts: Counter[int]) -> dict[int, float]:
    """Return counts as shares. Example: {0: 3, 1: 1} gives {0: 0.75, 1: 0.25}."""
    return {key: counts[key] / counts.total() for key in sorted(counts)}
