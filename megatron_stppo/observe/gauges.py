"""The columns gpu/*: NVML's measurements over all GPUs of a run. There are none without a GPU."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Sequence

import pynvml
import torch

from megatron_stppo.observe.nvml import Sampler
from megatron_stppo.parallel.collectives import gather_records

logger = logging.getLogger(__name__)
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


class Gauges:
    """Reads gpu/*. Every rank samples its own GPU, because a launcher may hide the node's other GPUs."""

    def __init__(self) -> None:
        self._sampler: Sampler | None = None
        if torch.cuda.is_available():
            try:
                self._sampler = Sampler(f"GPU-{torch.cuda.get_device_properties().uuid}")
            except pynvml.NVMLError as error:
                logger.warning("no GPU gauges: NVML reports %s", error)

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
    found = {name: [one[name] for one in readings if name in one] for name in OVER_GPUS}
    return {f"gpu/{name}": OVER_GPUS[name](values) for name, values in found.items() if values}
