"""What replicas measure, and the metrics of asynchronous training: how long each side waited, what updates
cost."""

from __future__ import annotations

import operator
import time
from collections.abc import Mapping

import msgspec
from msgspec.structs import astuple


class Counters(msgspec.Struct):
    """What a replica has done since it joined. Seconds are wall time.

    Example: Counters(seconds=10.0, idle_seconds=2.5) has waited for a quarter of the time.
    """

    seconds: float = 0.0  # since it joined, up to the newest of the following numbers
    steps: int = 0  # engine steps
    step_seconds: float = 0.0  # in engine steps
    idle_seconds: float = 0.0  # waiting for messages and for answers of environments, without engine steps
    updates: int = 0  # weight updates after the first, whose pause has ended
    pause_seconds: float = 0.0  # between the last step before and the first step after an update
    longest_pause: float = 0.0  # seconds
    recomputed: int = 0  # tokens whose key-value cache was computed again because of updates
    tokens: int = 0  # generated, in complete turns
    episodes: int = 0  # ended

    def __add__(self, other: Counters) -> Counters:
        """Return the sums, but the longer one of the longest pauses."""
        total = Counters(*map(operator.add, astuple(self), astuple(other)))
        total.longest_pause = max(self.longest_pause, other.longest_pause)
        return total


class Activity:
    """The counters of a replica since its first weights, which another thread may read.

    Times are seconds of a monotonic clock.

    An update that interrupts turns pauses them from the last engine step before it to the first one after it.
    Otherwise the pause is the time of the update itself.
    Example: after the first weights, a step that ends at 1.0, updated(1.1, 1.4, 50, True), and a step that
    begins at 1.5 are a pause of 0.5 s.
    """

    def __init__(self) -> None:
        self.counters = Counters()
        self._joined: float | None = None
        self._last_step = 0.0  # its end
        self._paused: float | None = None  # begin of the pause

    def waited(self, began: float, ended: float) -> None:
        """Add a wait for news."""
        if self._joined is not None:
            self.counters.idle_seconds += ended - began
            self.counters.seconds = ended - self._joined

    def stepped(self, began: float, ended: float) -> None:
        """Add an engine step."""
        assert self._joined is not None, "the engine has no weights"
        if self._paused is not None:
            self._add_pause(began - self._paused)
        self._last_step, self._paused = ended, None
        self.counters.steps += 1
        self.counters.step_seconds += ended - began
        self.counters.seconds = ended - self._joined

    def updated(self, began: float, ended: float, recomputed: int, interrupts: bool) -> None:
        """Add an update of the weights; the first one begins the count.

        recomputed: see Counters. interrupts: whether turns wait for it.
        """
        if self._joined is None:
            self._joined = ended
            return
        self.counters.recomputed += recomputed
        if interrupts:
            self._paused = self._last_step or began
        else:
            self._add_pause(ended - began)

    def gave(self, began: float, ended: float) -> None:
        """Add the time in which weights were sent to another replica: a pause that belongs to the update."""
        self._add_pause(ended - began, updates=0)

    def played(self, tokens: int, episodes: int) -> None:
        """Set how many tokens were generated, and add episodes that have ended."""
        self.counters.tokens = tokens
        self.counters.episodes += episodes

    def _add_pause(self, seconds: float, updates: int = 1) -> None:
        self.counters.updates += updates
        self.counters.pause_seconds += seconds
        self.counters.longest_pause = max(self.counters.longest_pause, seconds)


class ServingMeter:
    """Differences between two rows of metrics. `waited` and `sent` are added to by the caller.

    docs/metrics.md describes the metrics. A share or a mean of nothing is left out.
    """

    def __init__(self) -> None:
        self.start(Counters())

    def start(self, counters: Counters) -> None:
        """Begin to measure. counters: those of all replicas."""
        self._since, self._before = time.perf_counter(), counters
        self.waited = 0.0  # seconds that the trainer waited for replicas
        self.sent = 0  # bytes of weights

    def row(self, after: Counters, numbers: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics since the last call or since `start`, and start again.

        after: the counters of all replicas. numbers: the hub's metrics.
        """
        before, seconds = self._before, time.perf_counter() - self._since

        def since(field: str) -> float:
            return float(getattr(after, field) - getattr(before, field))

        row: dict[str, float] = {
            **numbers,
            "trainer_idle_share": self.waited / seconds,
            "generated_tokens": since("tokens"),
            "recomputed_tokens": since("recomputed"),
            "longest_pause_ms": 1000 * after.longest_pause,
            "weights_sent_mb": self.sent / 1e6,
        }
        if (served := since("seconds")) > 0:
            row["idle_share"] = since("idle_seconds") / served
            row["step_share"] = since("step_seconds") / served
        if (steps := since("steps")) > 0:
            row["step_ms"] = 1000 * since("step_seconds") / steps
            row["tokens_per_step"] = since("tokens") / steps
        if (updates := since("updates")) > 0:
            row["pause_ms"] = 1000 * since("pause_seconds") / updates
        speed = {"rollout/tokens_per_second": since("tokens") / seconds}
        self.start(after)
        return {f"serving/{name}": value for name, value in row.items()} | speed
