"""Trace a window of iterations with torch.profiler, for chrome://tracing or Perfetto."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


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
