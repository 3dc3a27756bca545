"""All measurements of a training run: deadlines, clocks, devices, and the rows of metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from megatron_stppo.base.types import Batch
from megatron_stppo.cluster.deadlines import Watchdog
from megatron_stppo.cluster.phases import Phases
from megatron_stppo.cluster.stragglers import Stragglers
from megatron_stppo.config import Config
from megatron_stppo.observe.gauges import Gauges
from megatron_stppo.observe.metrics import Metrics, peak_gib
from megatron_stppo.observe.profile import profiled
from megatron_stppo.observe.reporters import Reporter
from megatron_stppo.observe.throughput import throughput
from megatron_stppo.parallel.groups import MeshRank
from megatron_stppo.weights.sharding.hf_names import ModelShape


class Observer:
    """`with observer.phase("rollout"):` measures a phase; `observer.log(n, row)` writes a row."""

    def __init__(
        self,
        config: Config,
        shape: ModelShape,
        mesh: MeshRank,
        watchdog: Watchdog,
        resumed_at: int,
        reporting: Sequence[Reporter],
    ) -> None:
        """Continue after iteration `resumed_at`; 0 starts a new run."""
        self._config, self._shape, self._mesh = config, shape, mesh
        folder, telemetry = config.run.folder, config.telemetry
        self._metrics = Metrics(folder, mesh.rank, resumed_at, reporting, telemetry.nvtx)
        self._gauges, self._stragglers = Gauges(), Stragglers()
        self.phase = Phases(watchdog.phase, self._stragglers.phase, self._metrics.phase)
        self.log = self._metrics.log

    def profiled(self, iterations: Iterable[int]) -> Iterator[int]:
        """Yield the iterations. Rank 0 traces those of telemetry.profile."""
        window = self._config.telemetry.profile if self._mesh.rank == 0 else None
        return profiled(iterations, window, self._config.run.folder / "profile")

    def measure(self, batch: Batch) -> dict[str, Any]:
        """Return tokens per second, MFU, devices and stragglers since the last row, and peak memory.

        Collective.
        """
        speed = throughput(self._config, self._shape, batch, self._metrics.seconds, self._mesh.world)
        peak = {"memory/peak_gib": peak_gib()}
        return speed | self._gauges.read() | self._stragglers.compare() | peak

    def close(self) -> None:
        self._metrics.close()
        self._gauges.close()
