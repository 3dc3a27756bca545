"""Detect spikes: metrics of an update that are far from their recent values.

The recent values are described by their median and their median absolute deviation.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# The metrics that are checked. A magnitude up to this floor is never a spike: when the first rewards appear
# after a time without any, all these metrics rise from 0 to a small value.
FLOORS = {
    "actor/objective": 1.0,
    "actor/gradient_norm": 1.0,
    "actor/kl_to_old": 0.05,  # nats per token; the clip bounds of 0.2 allow about 0.02
    "critic/loss": 1.0,
}
TO_DEVIATION = 1.4826  # times the median absolute deviation: the standard deviation of a normal distribution
LEAST = 0.1  # the deviation is at least this fraction of the median


@dataclass(frozen=True)
class Spike:
    """A metric above its bound.

    Example: str(Spike("critic/loss", 30.0, 2.5)) is "critic/loss=30 exceeds 2.5".
    """

    metric: str
    value: float  # magnitude
    bound: float

    def __str__(self) -> str:
        return f"{self.metric}={self.value:.4g} exceeds {self.bound:.4g}"


class Spikes:
    """Detects spikes relative to the last `window` iterations, as soon as half as many have been recorded.

    Example: window 4, deviations 10, past 2, 2, 3, 2: the median is 2, the deviation LEAST * 2, the bound 4.
    """

    def __init__(self, window: int, deviations: float) -> None:
        self._deviations, self._window = deviations, window
        self._past: dict[str, deque[float]] = {name: deque(maxlen=window) for name in FLOORS}

    def look(self, row: Mapping[str, Any]) -> list[Spike]:
        """Return the spikes of an iteration, and record its values. Ignores values that are missing or not
        finite."""
        found = []
        for name, past in self._past.items():
            value = abs(row.get(name, math.nan))
            if not math.isfinite(value):
                continue
            if 2 * len(past) >= self._window and value > (bound := self._bound(name)):
                found.append(Spike(name, value, bound))
            past.append(value)
        return found

    def _bound(self, name: str) -> float:
        past = self._past[name]
        median = statistics.median(past)
        deviation = TO_DEVIATION * statistics.median(abs(value - median) for value in past)
        return max(FLOORS[name], median + self._deviations * max(deviation, LEAST * median))

    def state(self) -> dict[str, list[float]]:
        """Return the recorded values, which JSON can represent; restore() continues from them exactly."""
        return {name: list(past) for name, past in self._past.items()}

    def restore(self, state: Mapping[str, list[float]]) -> None:
        for name, past in self._past.items():
            past.extend(state.get(name, ()))
