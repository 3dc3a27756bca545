"""Detect stragglers: ranks that compute slower than the others for several iterations.

Collectives hide a slow rank: the others wait for it, and all ranks take the same time. Therefore each rank's
own busy seconds in the phases of WATCHED are compared:

- On a CPU, they are the elapsed time minus the time that gloo's operations wait (cpu_platform.timed_waits).
  Computing, sleeping, reading files, and waiting for a core all count as busy.
- On a GPU, collectives are queued, and the host cannot measure how long they wait. Instead, each rank
  measures the time of a fixed matrix product on its device after the phases. This detects a throttled or
  shared device, but not a rank that has more work than the others.
"""

import logging
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from megatron_stppo.parallel import cpu_platform
from megatron_stppo.parallel.collectives import gather_records

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
