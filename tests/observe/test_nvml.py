"""The sampler with the real nvidia-ml-py: without NVML, and with a replacement for NVML's library.

pynvml keeps the first library that it finds, so each case runs in a separate process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_stppo.observe.observer import Gauges, over_gpus

SOURCE = Path(__file__).with_name("fake_nvml.c")
# The sampler takes no sample during the test, except those of the two readings.
CODE = """
import json, sys
from megatron_stppo.observe.nvml import Sampler
sampler = Sampler(sys.argv[1], every=3600.0)
readings = [sampler.read(), sampler.read()]
sampler.close()
print(json.dumps(readings))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("nvml")
    command = ["gcc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", folder / "libnvidia-ml.so.1", SOURCE]
    subprocess.run(command, check=True)
    return folder


def sample(library: Path, uuid: str = "GPU-1", **environment: str) -> subprocess.CompletedProcess[str]:
    given = os.environ | {"LD_LIBRARY_PATH": str(library)} | environment
    return subprocess.run(
        [sys.executable, "-c", CODE, uuid], capture_output=True, text=True, env=given, timeout=60
    )


def test_samples_are_averaged_counters_give_their_increase_and_unsupported_gauges_are_omitted(
    library: Path,
) -> None:
    done = sample(library)
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)
    # a first reading checks what is supported, so the sampler starts at 600 W
    assert [reading["watts"] for reading in (first, second)] == [600.0, 500.0]
    for reading in (first, second):
        assert set(reading) == {
            *("memory_gib", "watts", "sm_mhz", "ecc_corrected", "nvlink_sent_gb_per_second")
        }
        assert (reading["memory_gib"], reading["sm_mhz"], reading["ecc_corrected"]) == (3.0, 1980.0, 2)
        assert reading["nvlink_sent_gb_per_second"] > 2**30 / 1e9, "1 GiB in less than a second"


def test_a_lost_gpu_ends_its_gauges_with_one_warning(library: Path) -> None:
    done = sample(library, FAKE_NVML_LOST="3")
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)
    assert first["watts"] == 600.0 and second == {}
    assert done.stderr == "no more GPU gauges: NVML reports GPU is lost\n"


def test_an_unknown_gpu_and_a_machine_without_nvml_raise_nvml_errors(library: Path, tmp_path: Path) -> None:
    assert "NVMLError_NotFound" in sample(library, uuid="GPU-2").stderr
    if not Path("/dev/nvidiactl").exists():
        assert "NVMLError_LibraryNotFound" in sample(tmp_path).stderr


def test_without_a_gpu_there_are_no_gauges_and_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    gauges = Gauges()
    assert [gauges.read(), gauges.read()] == [{}, {}]
    gauges.close()
    assert not caplog.records


def test_gauges_give_the_slowest_gpu_the_fullest_gpu_and_all_errors() -> None:
    readings = [
        {"watts": 600.0, "sm_mhz": 1980.0, "memory_gib": 3.0, "ecc_corrected": 1},
        {"watts": 700.0, "sm_mhz": 1200.0, "memory_gib": 4.0, "ecc_corrected": 2},
        {},
    ]
    assert over_gpus(readings) == {
        "gpu/memory_gib": 4.0,
        "gpu/watts": 650.0,
        "gpu/sm_mhz": 1200.0,
        "gpu/ecc_corrected": 3,
    }
