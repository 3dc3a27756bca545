"""Measure one GPU with NVML between two readings: memory, power, clock, ECC errors, NVLink traffic.

Does not import torch. A thread samples values for which NVML has no counter. Values that the GPU does not
support are left out.
"""

import logging
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pynvml

logger = logging.getLogger(__name__)
EVERY = 1.0  # seconds between samples
ALL_LINKS = 0xFFFFFFFF  # scope of an NVLink field: the sum over all links


def _ecc(kind: int) -> Callable[[Any], float]:
    return lambda gpu: pynvml.nvmlDeviceGetTotalEccErrors(gpu, kind, pynvml.NVML_VOLATILE_ECC)


def _nvlink(field: int) -> Callable[[Any], float]:
    def gigabytes(gpu: Any) -> float:
        (value,) = pynvml.nvmlDeviceGetFieldValues(gpu, [(field, ALL_LINKS)])
        if value.nvmlReturn:
            raise pynvml.NVMLError(value.nvmlReturn)
        return float(value.value.ullVal) * 1024 / 1e9

    return gigabytes


# (function that takes a sample, function that combines the samples of an interval).
SAMPLED: dict[str, tuple[Callable[[Any], float], Callable[[list[float]], float]]] = {
    "memory_gib": (lambda gpu: pynvml.nvmlDeviceGetMemoryInfo(gpu).used / 2**30, max),
    "watts": (lambda gpu: pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000, statistics.fmean),
    "sm_mhz": (lambda gpu: pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM), statistics.fmean),
}
# Counters that only increase; reported as the increase.
COUNTED = {
    "ecc_corrected": _ecc(pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
    "ecc_uncorrected": _ecc(pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
}
# Counters in GB; reported in GB per second.
RATES = {
    "nvlink_sent_gb_per_second": _nvlink(pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX),
    "nvlink_received_gb_per_second": _nvlink(pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX),
}


class Sampler:
    """Samples one GPU.

    Example: Sampler("GPU-5f0c..").read(), after a while, gives {"watts": 612.3, "sm_mhz": 1980.0, ..}.
    """

    def __init__(self, uuid: str, every: float = EVERY) -> None:
        """Start sampling. Raises pynvml.NVMLError if there is no NVML or no such GPU."""
        pynvml.nvmlInit()
        self._gpu = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        self._sampled = {name: take for name, (take, _) in SAMPLED.items() if self._has(take)}
        self._counters = {name: take for name, take in (COUNTED | RATES).items() if self._has(take)}
        self._last = {name: take(self._gpu) for name, take in self._counters.items()}
        self._since = time.monotonic()
        self._samples: dict[str, list[float]] = defaultdict(list)
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(every,), daemon=True)
        self._thread.start()

    def read(self) -> dict[str, float]:
        """Return the values since the last reading; empty after NVML has returned an error."""
        try:
            self._sample()
            counts = {name: take(self._gpu) for name, take in self._counters.items()}
        except pynvml.NVMLError as error:
            self._give_up(error)
            return {}
        now = time.monotonic()
        passed, self._since = now - self._since, now
        risen = {name: count - self._last[name] for name, count in counts.items()}
        self._last = counts
        with self._lock:
            samples, self._samples = self._samples, defaultdict(list)
        found = {name: SAMPLED[name][1](values) for name, values in samples.items()}
        return found | {name: value / passed if name in RATES else value for name, value in risen.items()}

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        pynvml.nvmlShutdown()

    def _has(self, take: Callable[[Any], float]) -> bool:
        try:
            take(self._gpu)
        except pynvml.NVMLError_NotSupported:
            return False
        return True

    def _run(self, every: float) -> None:
        while not self._ended.wait(every):
            try:
                self._sample()
            except pynvml.NVMLError as error:
                self._give_up(error)

    def _sample(self) -> None:
        taken = {name: take(self._gpu) for name, take in self._sampled.items()}
        with self._lock:
            for name, value in taken.items():
                self._samples[name].append(value)

    def _give_up(self, error: pynvml.NVMLError) -> None:
        if not self._ended.is_set():
            self._ended.set()
            logger.warning("no more GPU gauges: NVML reports %s", error)
        self._sampled, self._counters = {}, {}
