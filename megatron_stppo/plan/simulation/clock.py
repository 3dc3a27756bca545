"""The clock of a simulation: a queue of calls, each at a time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Clock:
    """Makes calls in order of their times. Calls of the same time are made in the order they were added,
    those added with `last` after all others."""

    def __init__(self) -> None:
        self.now = 0.0  # seconds
        self._calls: list[tuple[float, bool, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def at(self, seconds: float, call: Callable[[], None], *, last: bool = False) -> None:
        assert seconds >= self.now, (seconds, self.now)
        heapq.heappush(self._calls, (seconds, last, next(self._count), call))

    def run(self, done: Callable[[], bool]) -> None:
        """Make calls until `done()`. Some call must be left until then."""
        while not done():
            assert self._calls, "nothing is left to do: the simulation is stuck"
            self.now, _, _, call = heapq.heappop(self._calls)
            call()
