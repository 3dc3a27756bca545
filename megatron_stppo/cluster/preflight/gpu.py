"""Measure one GPU: its identity and state through NVML, and a matrix product, which loads it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pynvml
import torch

from megatron_stppo.cluster.preflight.records import GpuFacts
from megatron_stppo.ops import extension

# Reasons for a lower clock that name a defect of power, cooling or hardware. A power limit is normal.
THROTTLING = {
    pynvml.nvmlClocksThrottleReasonHwSlowdown: "hardware slowdown",
    pynvml.nvmlClocksThrottleReasonSwThermalSlowdown: "too hot (software)",
    pynvml.nvmlClocksThrottleReasonHwThermalSlowdown: "too hot (hardware)",
    pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown: "power brake",
}
UNCORRECTED = (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
SIDE_CUDA, SIDE_CPU = 8192, 512  # rows and columns of the matrices
LOAD_SECONDS = 1.0  # the clock is read in the middle of this time


def examine(index: int) -> GpuFacts:
    """Return identity and state of the GPU that this process sees as `index`, without loading it."""
    properties = torch.cuda.get_device_properties(index)
    major, minor = properties.major, properties.minor
    archs = extension.parts().get("cuda", "").removeprefix("sm_")
    with _nvml(index) as device:
        return GpuFacts(
            properties.name,
            pynvml.nvmlDeviceGetUUID(device),
            f"sm_{major}{minor}",
            bool(archs) and extension.fits(archs, major, minor),
            driver=pynvml.nvmlSystemGetDriverVersion(),
            memory_used=pynvml.nvmlDeviceGetMemoryInfo(device).used / 2**30,
            uncorrected_errors=_supported(pynvml.nvmlDeviceGetTotalEccErrors, device, *UNCORRECTED),
            remapped_rows=_remapped(device),
        )


def load(index: int) -> tuple[float, float | None, tuple[str, ...]]:
    """Multiply matrices in bfloat16 for about a second.

    Return (TFLOP/s, SM clock meanwhile / maximum, reasons of THROTTLING). Example: (650.0, 0.93, ()).
    """
    torch.cuda.set_device(index)
    matrix = torch.zeros(SIDE_CUDA, SIDE_CUDA, dtype=torch.bfloat16, device="cuda").normal_()
    out = torch.empty_like(matrix)
    _seconds(matrix, out)  # the first call loads libraries
    count = max(10, int(LOAD_SECONDS / _seconds(matrix, out)))
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        torch.mm(matrix, matrix, out=out)
    end.record()
    time.sleep(LOAD_SECONDS / 2)
    clock, throttled = _clock(index)
    end.synchronize()
    return 2 * SIDE_CUDA**3 * count / (start.elapsed_time(end) / 1000) / 1e12, clock, throttled


def load_cpu() -> float:
    """Multiply small matrices in float32 on this rank's threads. Return TFLOP/s of the fastest of 20."""
    matrix = torch.ones(SIDE_CPU, SIDE_CPU)
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        matrix @ matrix
        seconds.append(time.perf_counter() - start)
    return 2 * SIDE_CPU**3 / min(seconds) / 1e12


def _seconds(matrix: torch.Tensor, out: torch.Tensor, count: int = 10) -> float:
    """Return the time of one product on the GPU."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        torch.mm(matrix, matrix, out=out)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / count


@contextmanager
def _nvml(index: int) -> Iterator[Any]:
    """Yield NVML's handle of the GPU that this process sees as `index`. NVML also counts hidden GPUs."""
    pynvml.nvmlInit()
    try:
        yield pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}")
    finally:
        pynvml.nvmlShutdown()


def _clock(index: int) -> tuple[float | None, tuple[str, ...]]:
    """Return (SM clock / maximum, reasons of THROTTLING that hold now)."""
    with _nvml(index) as device:
        now = _supported(pynvml.nvmlDeviceGetClockInfo, device, pynvml.NVML_CLOCK_SM)
        highest = _supported(pynvml.nvmlDeviceGetMaxClockInfo, device, pynvml.NVML_CLOCK_SM)
        reasons = _supported(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, device) or 0
    throttled = tuple(text for bit, text in THROTTLING.items() if reasons & bit)
    return (now / highest if now is not None and highest else None), throttled


def _remapped(device: Any) -> str:
    _, _, pending, failed = _supported(pynvml.nvmlDeviceGetRemappedRows, device) or (0, 0, 0, 0)
    return "failed" if failed else "pending" if pending else ""


def _supported(query: Callable[..., Any], *arguments: Any) -> Any:
    """Return what NVML answers, or None if this GPU or driver does not support the query."""
    try:
        return query(*arguments)
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_NoPermission):
        return None
