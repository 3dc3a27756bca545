"""What NVML does not support is no error. On a machine with a GPU, it is examined and loaded."""

from __future__ import annotations

import re
from pathlib import Path

import pynvml
import pytest
import torch

from megatron_stppo.cluster.preflight import measure
from megatron_stppo.cluster.preflight.exchange import RankReport


def failing(code: int) -> None:
    raise pynvml.NVMLError(code)


def test_an_unsupported_query_is_none_and_a_lost_gpu_is_an_error() -> None:
    for code in (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_NO_PERMISSION):
        assert measure.supported(failing, code) is None
    with pytest.raises(pynvml.NVMLError_GpuIsLost):
        measure.supported(failing, pynvml.NVML_ERROR_GPU_IS_LOST)


def test_every_name_of_nvml_exists_in_the_installed_package() -> None:
    names = set(re.findall(r"pynvml\.(\w+)", Path(measure.__file__).read_text()))
    assert len(names) == 17
    assert [name for name in sorted(names) if not hasattr(pynvml, name)] == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_has_a_driver_and_a_speed_under_load() -> None:
    report = RankReport("a")
    measure.measure_gpu(report, "rank 0 (a)", 0)
    numbers = {name: value for name, _, value in report.numbers}
    assert report.texts["version of the driver"] and numbers["max_memory_used"] > 0
    assert numbers["min_compute"] > 1
