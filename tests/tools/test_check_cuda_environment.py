"""The parts of the check of the CUDA environment that run without it."""

from __future__ import annotations

import ctypes
import json
import re
import subprocess
import sys
from pathlib import Path

from megatron_stppo.weights.sharding.hf_names import families
from tools.cuda_environment import models, packages, stand_ins

TOOL = Path(__file__).parents[2] / "tools/check_cuda_environment.py"


def library(path: Path, source: str, *flags: str) -> None:
    path.with_suffix(".c").write_text(source)
    subprocess.run(
        ["cc", "-shared", "-fPIC", str(path.with_suffix(".c")), *flags, "-o", str(path)], check=True
    )


def test_the_stub_of_the_driver_has_the_functions_that_libraries_need_and_each_returns_an_error(tmp_path):
    libraries, driver, stub = (tmp_path / name for name in ("packages", "driver", "stub"))
    for folder in (libraries, driver, stub):
        folder.mkdir()
    library(driver / "libcuda.so.1", "int cuInit(void) { return 0; }", "-Wl,-soname,libcuda.so.1")
    library(
        libraries / "a.so", "int cuInit(void); int f(void) { return cuInit(); }", str(driver / "libcuda.so.1")
    )
    library(libraries / "b.so", "int cuOther(void); int f(void) { return cuOther(); }")  # needs no driver
    assert stand_ins.write_stub([libraries], stub) == 1
    assert ctypes.CDLL(str(stub / "libcuda.so.1")).cuInit() == stand_ins.STUB_LIBRARY


def test_every_family_has_a_model(tmp_path):
    folders = [models.write_config(tmp_path, family) for family in models.FAMILIES]
    kinds = {json.loads((folder / "config.json").read_text())["model_type"] for folder in folders}
    assert kinds == set(families())
    assert set(models.WITH_EXPERTS) == {"qwen3_moe", "mixtral", "qwen3.5_moe", "qwen3_next", "gpt_oss"}


def test_the_exit_status_is_the_number_of_failed_checks():
    """The packages of this environment are not those of the GPU's."""
    line = [sys.executable, str(TOOL), "--only", "installed"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=240)
    failed = re.findall(r"^FAILED +[\d.]+ s  (\w+)", done.stdout, re.MULTILINE)
    assert "versions" in failed, done.stdout
    assert done.returncode == len(failed), done.stderr


def test_only_an_override_may_contradict_what_a_package_asks_for():
    cudnn = "torch 2.13.0 has requirement nvidia-cudnn-cu13==9.20.0.48, but you have nvidia-cudnn-cu13 "
    other = "a 1.0 has requirement b==1, but you have b 2."
    assert packages.unexpected(f"{cudnn}9.22.0.52.\n{other}\n") == [other]
    assert packages.unexpected(f"{cudnn}9.21.0.82.") == [f"{cudnn}9.21.0.82."]
