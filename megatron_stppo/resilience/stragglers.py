"""Which rank computes slower than the others, and for how long already.

A program of collectives hides its slow rank: the others wait for it, and all show the same time. What is
compared is therefore each rank's own busy seconds in the watched phases:

- on a CPU, the time on the clock less the time waited for messages (Work.wait of torch.distributed, which
  every gloo operation ends in): computing, sleeping, reading files, and waiting for a core all count;
- on a GPU collectives are queued, and the host sees nothing of their waiting. There it is the time of a fixed
  product of matrices, done on the device after the phases: a throttled or shared device shows, more work than
  the others' does not.
"""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from megatron_stppo.parallel.collectives import gather_records

log = logging.getLogger(__name__)
WATCHED = ("score", "update")
RATIO = 1.5  # to the median of the other ranks
PATIENCE = 3  # iterations in a row
SIDE, PRODUCTS = 4096, 20  # of the square matrices: 3 TFLOP, a few ms of a data-centre GPU


class Stragglers:
    """Example: busy seconds 1, 1, 1.6 in three iterations in a row: straggler/rank is 2 in the third."""

    def __init__(self, ratio: float = RATIO, patience: int = PATIENCE) -> None:
        self._ratio, self._patience = ratio, patience
        self._busy = 0.0
        self._slow: tuple[int, int] = (-1, 0)  # a rank, and the iterations in a row that it has been slow

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts this rank's busy seconds where `name` is a watched phase."""
        if name not in WATCHED:
            yield
            return
        started = time.perf_counter()
        with waiting() as waited:
            yield
        self._busy += time.perf_counter() - started - sum(waited)

    def compare(self) -> dict[str, Any]:
        """The slowest rank's busy seconds since the last call over the median of the other ranks', and the
        rank once it has been slow for `patience` calls in a row, else None. Collective; equal on all ranks.
        """
        gpu = torch.cuda.is_available()
        busy = product_seconds(torch.device("cuda"), SIDE, PRODUCTS) if gpu else self._busy
        self._busy = 0.0
        rank, ratio = slowest([seconds for (seconds,) in gather_records([busy], float)])
        times = self._slow[1] + 1 if rank == self._slow[0] else 1
        self._slow = (rank, times) if ratio > self._ratio else (-1, 0)
        flagged = self._slow[1] >= self._patience
        if self._slow[1] == self._patience and dist.get_rank() in (0, rank):
            log.warning("rank %d took %.2f times as long as the others, %d iterations on", rank, ratio, times)
        return {"straggler/rank": rank if flagged else None, "straggler/ratio": ratio}


def slowest(seconds: Sequence[float]) -> tuple[int, float]:
    """(rank, its seconds over the median of the others'). Example: [1, 3, 2] gives (1, 2.0)."""
    rank = max(range(len(seconds)), key=seconds.__getitem__)
    others = [*seconds[:rank], *seconds[rank + 1 :]]
    usual = statistics.median(others) if others else seconds[rank]
    return rank, seconds[rank] / max(usual, 1e-9)


@contextmanager
def waiting() -> Iterator[list[float]]:
    """The seconds of each wait for a message by this thread; a checkpoint's writer waits in its own."""
    wait, waits, own = dist.Work.wait, [], threading.get_ident()

    def timed(work: dist.Work, *timeout: Any) -> Any:
        started = time.perf_counter()
        try:
            return wait(work, *timeout)
        finally:
            if threading.get_ident() == own:
                waits.append(time.perf_counter() - started)

    dist.Work.wait = timed  # type: ignore[method-assign, assignment]
    try:
        yield waits
    finally:
        dist.Work.wait = wait  # type: ignore[method-assign]


def product_seconds(device: torch.device, side: int, products: int) -> float:
    """Seconds of `products` products of bfloat16 matrices [side, side], after one that is not counted."""
    a = torch.ones(side, side, dtype=torch.bfloat16, device=device)
    out = a @ a
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    for _ in range(products):
        torch.mm(a, a, out=out)
    torch.cuda.synchronize(device)
    return time.perf_counter() - started
