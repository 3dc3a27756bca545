"""The metrics of asynchronous training: who waited for whom, and what updates cost."""

from __future__ import annotations

import time

from megatron_stppo.serving.hub import Hub
from megatron_stppo.serving.messages import Counters


class ServingMeter:
    """Differences between two rows of metrics. `waited` and `sent` are added to by the caller."""

    def __init__(self) -> None:
        self.waited = 0.0  # seconds that the trainer waited for trajectories
        self.sent = 0  # bytes of weights
        self._since = time.perf_counter()
        self._before: dict[str, Counters] = {}

    def row(self, hub: Hub) -> dict[str, float]:
        """Return the metrics since the last call, and reset `waited` and `sent`.

        Those of replicas are sums, but idle_share is a mean over the replicas, and pause_ms a mean over their
        updates.
        """
        now, counters = time.perf_counter(), hub.counters()
        seconds, self._since = now - self._since, now
        earlier = [self._before.get(group, Counters()) for group in counters]
        self._before = counters

        def since(field: str) -> float:
            pairs = zip(counters.values(), earlier, strict=True)
            return float(sum(getattr(after, field) - getattr(before, field) for after, before in pairs))

        waited, self.waited = self.waited, 0.0
        sent, self.sent = self.sent, 0
        replicas, updates = max(1, len(counters)), max(1.0, since("updates"))
        row = {
            "replicas": len(counters),
            "lost": hub.lost,
            "again": hub.again,
            "overtaken": hub.overtaken(),
            "steps": since("steps"),
            "step_seconds": since("step_seconds"),
            "tokens": since("tokens"),
            "recomputed": since("recomputed"),
            "idle_share": since("idle_seconds") / replicas / seconds,
            "trainer_idle_share": waited / seconds,
            "pause_ms": 1000 * since("pause_seconds") / updates,
            "longest_pause_ms": 1000 * max((c.longest_pause for c in counters.values()), default=0.0),
            "weights_gb": sent / 1e9,
            **hub.queues(),
        }
        speed = {"rollout/tokens_per_second": since("tokens") / seconds}
        return {f"serving/{name}": value for name, value in row.items()} | speed
