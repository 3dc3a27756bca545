"""All measurements of a training run: deadlines, clocks, devices, and the rows of metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from megatron_stppo.base.types import Batch
from megatron_stppo.cluster.deadlines import Watchdog
from megatron_stppo.cluster.stragglers import Stragglers
from megatron_stppo.config import Config
from megatron_stppo.observe.gauges import Gauges
from megatron_stppo.observe.metrics import Metrics, peak_gib
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
        self._config, self._shape, self._mesh, self._watchdog = config, shape, mesh, watchdog
        folder, telemetry = config.run.folder, config.telemetry
        self._metrics = Metrics(folder, mesh.rank, resumed_at, reporting, telemetry.nvtx)
        self._gauges, self._stragglers = Gauges(), Stragglers()
        self.log = self._metrics.log

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Apply the deadline of phase `name` to the block, and count its time."""
        with self._watchdog.phase(name), self._stragglers.phase(name), self._metrics.phase(name):
            yield

    def profiled(self, iterations: Iterable[int]) -> Iterator[int]:
        """Yield the iterations. Rank 0 traces those of telemetry.profile with torch.profiler."""
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


def profiled(iterations: Iterable[int], window: tuple[int, int] | None, folder: Path) -> Iterator[int]:
    """Yield the iterations, numbered from 0, and trace those of `window` into one file under `folder`.

    `window`: first and last row of metrics.jsonl to trace, numbered from 1. None: trace nothing.
    Example: window (2, 3) traces the loop's work on iterations 1 and 2 into from-iteration-2.json.gz.
    """
    first, last = window or (0, 0)
    left = iter(iterations)
    for iteration in left:
        if not first <= iteration + 1 <= last:
            yield iteration
            continue
        with _trace(folder / f"from-iteration-{iteration + 1}.json.gz"):
            yield iteration
            while iteration + 1 < last and (following := next(left, None)) is not None:
                iteration = following
                yield iteration


@contextmanager
def _trace(path: Path) -> Iterator[None]:
    gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    trace = profile(activities=[ProfilerActivity.CPU, *gpu])
    trace.start()
    try:
        yield
    finally:  # also if the run ends inside the window
        trace.stop()
        path.parent.mkdir(parents=True, exist_ok=True)
        trace.export_chrome_trace(str(path))
