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
        self.start(Counters())

    def start(self, counters: Counters) -> None:
        """Begin to measure. counters: those of the hub."""
        self._since, self._before = time.perf_counter(), counters
        self.waited = 0.0  # seconds that the trainer waited for replicas
        self.sent = 0  # bytes of weights

    def row(self, hub: Hub) -> dict[str, float]:
        """Return the metrics since the last call or since `start`, and start again."""
        after, before = hub.counters(), self._before
        seconds = time.perf_counter() - self._since

        def since(field: str) -> float:
            return float(getattr(after, field) - getattr(before, field))

        row: dict[str, float] = {
            **hub.numbers(),
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
