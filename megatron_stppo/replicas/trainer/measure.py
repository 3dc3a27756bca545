"""The metrics of asynchronous training: how long each side waited, and what updates cost."""

from __future__ import annotations

import time

from megatron_stppo.replicas.trainer.hub import Hub
from megatron_stppo.replicas.wire.messages import Counters


class ServingMeter:
    """Differences between two rows of metrics. `waited` and `sent` are added to by the caller.

    docs/metrics.md describes the metrics. A share or a mean of nothing is left out.
    """

    def __init__(self) -> None:
        self._start(time.perf_counter(), Counters())

    def start(self, hub: Hub) -> None:
        """Begin to measure: the replicas have joined, and training starts."""
        self._start(time.perf_counter(), hub.counters())

    def row(self, hub: Hub) -> dict[str, float]:
        """Return the metrics since the last call or since `start`, and start again."""
        now, after, before = time.perf_counter(), hub.counters(), self._before
        seconds, waited, sent = now - self._since, self.waited, self.sent
        self._start(now, after)

        def since(field: str) -> float:
            return float(getattr(after, field) - getattr(before, field))

        row: dict[str, float] = {
            **hub.numbers(),
            "trainer_idle_share": waited / seconds,
            "generated_tokens": since("tokens"),
            "recomputed_tokens": since("recomputed"),
            "longest_pause_ms": 1000 * after.longest_pause,
            "weights_sent_mb": sent / 1e6,
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
        return {f"serving/{name}": value for name, value in row.items()} | speed

    def _start(self, now: float, counters: Counters) -> None:
        self._since, self._before = now, counters
        self.waited = 0.0  # seconds that the trainer waited for replicas
        self.sent = 0  # bytes of weights
