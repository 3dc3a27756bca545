"""A torch.profiler trace of a window of iterations, for chrome://tracing or Perfetto."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


def profiled(iterations: Iterable[int], window: tuple[int, int] | None, folder: Path) -> Iterator[int]:
    """Yields the iterations (from 0); rows window[0] to window[1] of metrics.jsonl (from 1) are traced, into
    one file under `folder`. None: nothing is.

    Example: window (2, 3) traces what happens while 1 and 2 are out, into from-iteration-2.json.gz.
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
    finally:  # also where the run leaves inside the window
        trace.stop()
        path.parent.mkdir(parents=True, exist_ok=True)
        trace.export_chrome_trace(str(path))
