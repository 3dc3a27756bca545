"""The ceilings of a machine, with which the other numbers are compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.benchmark import Timer


def ceilings() -> dict[str, Any]:
    """Return the bandwidth of a copy in GB/s, and the rate of matrix products in TFLOP/s."""
    gpu = torch.cuda.is_available()
    device = "cuda" if gpu else "cpu"
    size = 2**30 if gpu else 2**25
    source = torch.empty(size, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    found = {"copy_gb_per_s": 2 * size / _seconds(lambda: target.copy_(source)) / 1e9}
    for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32)):
        n = (8192 if dtype == torch.bfloat16 else 4096) if gpu else 512
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        found[f"{name}_tflop_per_s"] = 2 * n**3 / _seconds(lambda a=a, b=b: torch.mm(a, b)) / 1e12
    return {name: round(value, 3) for name, value in found.items()}


def _seconds(run: Callable[[], object]) -> float:
    """Return the median time of a call, with the device's work."""
    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=0.2).median
