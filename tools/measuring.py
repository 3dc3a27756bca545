"""What the benchmarks share: percentiles, the description of a machine, tables in Markdown."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import torch

from megatron_stppo.ops import extension


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextmanager
def timed(seconds: dict[str, Any], name: str) -> Iterator[None]:
    """Add the seconds of the block to `seconds`, with the work of the GPU that it has started."""
    synchronize()
    start = time.perf_counter()
    yield
    synchronize()
    seconds[name] = time.perf_counter() - start


def percentiles(values: Sequence[float]) -> list[float]:
    """Return [p10, median, p90]. Example: 1..11 give [2, 6, 10]."""
    ordered = sorted(values)
    return [ordered[round((len(ordered) - 1) * part)] for part in (0.1, 0.5, 0.9)]


def machine(device: str) -> dict[str, Any]:
    """Return the description of the machine that is stored with the numbers."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    fields = dict(map(str.strip, line.split(":", 1)) for line in text.splitlines() if ":" in line)
    flags = set(fields.get("flags", "").split())
    on_gpu = device == "cuda"
    return {
        "device": device,
        "name": torch.cuda.get_device_name() if on_gpu else fields.get("model name", platform.machine()),
        "vectors": next((name for name in ("avx512bw", "avx2") if name in flags), "baseline"),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "extension": extension.parts(),
        "load": round(os.getloadavg()[0], 1),  # above the threads: other processes were running
        "date": date.today().isoformat(),
    }


def headline(about: dict[str, Any]) -> str:
    """Return the line above a table."""
    cuda = f", CUDA {about['cuda']}" if about["device"] == "cuda" else ""
    return (
        f"{about['name']} ({about['device']}, {about['vectors']}), {about['threads']} threads of "
        f"{about['cores']} cores; torch {about['torch']}{cuda}; load {about['load']:g}; {about['date']}"
    )


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table in Markdown."""
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in (head, ["---"] * len(head), *rows))
