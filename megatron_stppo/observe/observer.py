"""All measurements of a training run: deadlines, clocks, devices, and the rows of metrics."""

import logging
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pynvml
import torch
from torch.profiler import ProfilerActivity, profile

from megatron_stppo.base.types import Batch
from megatron_stppo.cluster.deadlines import Watchdog
from megatron_stppo.cluster.stragglers import Stragglers
from megatron_stppo.config import Config
from megatron_stppo.observe.metrics import Metrics, peak_gib
from megatron_stppo.observe.nvml import Sampler
from megatron_stppo.observe.reporters import Reporter
from megatron_stppo.observe.throughput import throughput
from megatron_stppo.parallel.collectives import gather_records
from megatron_stppo.parallel.groups import MeshRank
from megatron_stppo.weights.sharding.hf_names import ModelShape

log = logging.getLogger(__name__)
# How the values of all GPUs are combined: largest memory, lowest clock, sum of errors, mean of the rest.
OVER_GPUS: dict[str, Callable[[Sequence[float]], float]] = {
    "memory_gib": max,
    "watts": statistics.fmean,
    "sm_mhz": min,
    "ecc_corrected": sum,
    "ecc_uncorrected": sum,
    "nvlink_sent_gb_per_second": statistics.fmean,
    "nvlink_received_gb_per_second": statistics.fmean,
}


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


class Gauges:
    """Reads gpu/*. Every rank samples its own GPU, because a launcher may hide the node's other GPUs."""

    def __init__(self) -> None:
        self._sampler: Sampler | None = None
        if torch.cuda.is_available():
            try:
                self._sampler = Sampler(f"GPU-{torch.cuda.get_device_properties().uuid}")
            except pynvml.NVMLError as error:
                log.warning("no GPU gauges: NVML reports %s", error)

    def read(self) -> dict[str, float]:
        """Return gpu/* since the last call, equal on all ranks. Collective if there are GPUs."""
        if not torch.cuda.is_available():
            return {}
        mine = self._sampler.read() if self._sampler else {}
        return over_gpus([of_rank[0] for of_rank in gather_records([mine], dict[str, float])])

    def close(self) -> None:
        if self._sampler is not None:
            self._sampler.close()


def over_gpus(readings: Sequence[dict[str, float]]) -> dict[str, float]:
    """Combine all ranks' values.

    Example: [{"watts": 600.0}, {"watts": 700.0}, {}] gives {"gpu/watts": 650.0}.
    """
    values = {name: [of_gpu[name] for of_gpu in readings if name in of_gpu] for name in OVER_GPUS}
    return {f"gpu/{name}": OVER_GPUS[name](known) for name, known in values.items() if known}


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
