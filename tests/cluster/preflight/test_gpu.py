"""What NVML does not support is no error. On a machine with a GPU, it is examined and loaded."""

from __future__ import annotations

import re
from pathlib import Path

import pynvml
import pytest
import torch

from megatron_stppo.cluster.preflight import gpu


def failing(code: int) -> None:
    raise pynvml.NVMLError(code)


def test_an_unsupported_query_is_none_and_a_lost_gpu_is_an_error() -> None:
    for code in (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_NO_PERMISSION):
        assert gpu._supported(failing, code) is None
    with pytest.raises(pynvml.NVMLError_GpuIsLost):
        gpu._supported(failing, pynvml.NVML_ERROR_GPU_IS_LOST)


def test_every_name_of_nvml_exists_in_the_installed_package() -> None:
    names = set(re.findall(r"pynvml\.(\w+)", Path(gpu.__file__).read_text()))
    assert len(names) > 20
    assert [name for name in sorted(names) if not hasattr(pynvml, name)] == []


def test_a_matrix_product_on_the_cpu_has_a_speed() -> None:
    assert gpu.load_cpu() > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_has_a_uuid_a_driver_and_a_clock_under_load() -> None:
    facts, (compute, clock, _throttled) = gpu.examine(0), gpu.load(0)
    assert facts.uuid.startswith("GPU-") and facts.driver and facts.memory_used is not None
    assert compute > 1
    assert clock is None or 0.1 < clock <= 1
