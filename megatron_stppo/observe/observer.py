"""All measurements of a training run: deadlines, clocks, devices, stragglers, and the rows of metrics.

Stragglers are ranks that compute slower than the others for several iterations. Collectives hide a slow rank:
the others wait for it, and all ranks take the same time. Therefore each rank's own busy seconds in the phases
of WATCHED are compared:

- On a CPU, they are the elapsed time minus the time that gloo's operations wait (cpu_platform.timed_waits).
  Computing, sleeping, reading files, and waiting for a core all count as busy.
- On a GPU, collectives are queued, and the host cannot measure how long they wait. Instead, each rank
  measures the time of a fixed matrix product on its device after the phases. This detects a throttled or
  shared device, but not a rank that has more work than the others.
"""

import logging
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pynvml
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from megatron_stppo.base.types import Batch
from megatron_stppo.cluster.deadlines import Watchdog
from megatron_stppo.config import Config
from megatron_stppo.observe.metrics import Metrics, peak_gib
from megatron_stppo.observe.nvml import Sampler
from megatron_stppo.observe.reporters import Reporter
from megatron_stppo.observe.throughput import throughput
from megatron_stppo.parallel import cpu_platform
from megatron_stppo.parallel.collectives import gather_records
from megatron_stppo.parallel.groups import MeshRank
from megatron_stppo.weights.sharding.hf_names import ModelShape

log = logging.getLogger(__name__)
WATCHED = ("score", "update")
RATIO = 1.5  # to the median of the other ranks
PATIENCE = 3  # iterations in a row
SIDE, PRODUCTS = 4096, 20  # of the square matrices: 3 TFLOP, a few ms on a data-centre GPU


class Stragglers:
    """Compares the busy seconds of all ranks.

    Example: busy seconds 1, 1, 1.6 in three iterations in a row: straggler/rank is 2 in the third.
    """

    def __init__(self, ratio: float = RATIO, patience: int = PATIENCE) -> None:
        self._ratio, self._patience = ratio, patience
        self._busy = 0.0
        self._slow: tuple[int, int] = (-1, 0)  # (rank, iterations in a row in which it was slow)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the block's busy seconds on this rank, if `name` is in WATCHED. On a GPU, measure nothing."""
        if name not in WATCHED or not cpu_platform.needed():
            yield
            return
        started = time.perf_counter()
        with cpu_platform.timed_waits() as waited:
            yield
        self._busy += time.perf_counter() - started - sum(waited)

    def compare(self) -> dict[str, Any]:
        """Return straggler/ratio and straggler/rank. Collective. All ranks return the same values.

        The ratio is the slowest rank's busy seconds since the last call / the median of the other ranks'. The
        rank is given once it has been slow for `patience` calls in a row, else it is None.
        """
        gpu = torch.cuda.is_available()
        busy = product_seconds() if gpu else self._busy
        self._busy = 0.0
        rank, ratio = slowest([seconds for (seconds,) in gather_records([busy], float)])
        times = self._slow[1] + 1 if rank == self._slow[0] else 1
        self._slow = (rank, times) if ratio > self._ratio else (-1, 0)
        flagged = self._slow[1] >= self._patience
        if self._slow[1] == self._patience and dist.get_rank() in (0, rank):
            log.warning(
                "rank %d took %.2f times as long as the others, for %d iterations", rank, ratio, times
            )
        return {"straggler/rank": rank if flagged else None, "straggler/ratio": ratio}


def slowest(seconds: Sequence[float]) -> tuple[int, float]:
    """Return (slowest rank, its seconds / the median of the others). Example: [1, 3, 2] gives (1, 2.0)."""
    rank = max(range(len(seconds)), key=seconds.__getitem__)
    others = [*seconds[:rank], *seconds[rank + 1 :]]
    usual = statistics.median(others) if others else seconds[rank]
    return rank, seconds[rank] / max(usual, 1e-9)


def product_seconds() -> float:
    """Return the seconds of PRODUCTS bfloat16 matrix products on the GPU, after one warm-up product."""
    a = torch.ones(SIDE, SIDE, dtype=torch.bfloat16, device="cuda")
    out = a @ a
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(PRODUCTS):
        torch.mm(a, a, out=out)
    torch.cuda.synchronize()
    return time.perf_counter() - started


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
