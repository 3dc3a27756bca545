"""The machine: versions, clocks, and the ceilings with which the other numbers are compared."""

from __future__ import annotations

import importlib.metadata
import inspect
import platform
import time
from collections.abc import Callable
from typing import Any

import torch

from gpu_checks import main

PACKAGES = ("torch", "triton", "megatron-core", "transformer-engine", "vllm", "transformers", "numpy", "apex")


def versions() -> dict[str, Any]:
    """Return the versions of what is installed, the signature of varlen_attn, and the GPU's clocks."""
    from torch.nn.attention.varlen import varlen_attn

    found: dict[str, Any] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    found["varlen_attn"] = f"varlen_attn{inspect.signature(varlen_attn)}"
    if torch.cuda.is_available():
        about = torch.cuda.get_device_properties(0)
        found |= {"device": about.name, "multiprocessors": about.multi_processor_count}
        found |= {"memory_gib": round(about.total_memory / 2**30, 1), "cuda": torch.version.cuda}
        found |= _clocks()
    else:
        found |= {"device": f"CPU, {platform.machine()}, {torch.get_num_threads()} threads"}
    return found


def _clocks() -> dict[str, Any]:
    """Return the GPU's driver, power limit and clocks in MHz; the reason if NVML does not answer."""
    try:
        import pynvml

        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
        kinds = {"sm": pynvml.NVML_CLOCK_SM, "memory": pynvml.NVML_CLOCK_MEM}
        clocks = {f"{name}_mhz": pynvml.nvmlDeviceGetClockInfo(gpu, kind) for name, kind in kinds.items()}
        most = {
            f"{name}_max_mhz": pynvml.nvmlDeviceGetMaxClockInfo(gpu, kind) for name, kind in kinds.items()
        }
        watts = pynvml.nvmlDeviceGetPowerManagementLimit(gpu) / 1000
        return {"driver": pynvml.nvmlSystemGetDriverVersion(), "power_limit_w": watts} | clocks | most
    except Exception as reason:  # it is reported; the clocks are no condition of the other checks
        return {"clocks": f"unknown: {reason}"}


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


def _seconds(run: Callable[[], object], repeats: int = 10) -> float:
    """Return the median time of a call, the device's work included, after three warm-up calls."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        synchronize()
        start = time.perf_counter()
        run()
        synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times)[repeats // 2]


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(versions, ceilings)
