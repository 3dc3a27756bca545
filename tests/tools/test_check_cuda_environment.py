"""The parts of the check of the CUDA environment that run without it."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path

from megatron_stppo.weights.sharding.hf_names import families
from tools.cuda_environment import installed, models, stand_ins

TOOL = Path(__file__).parents[2] / "tools/check_cuda_environment.py"


def library(path: Path, source: str, *flags: str) -> None:
    path.with_suffix(".c").write_text(source)
    subprocess.run(
        ["cc", "-shared", "-fPIC", str(path.with_suffix(".c")), *flags, "-o", str(path)], check=True
    )


def test_the_stub_of_the_driver_has_the_functions_that_libraries_need_and_each_returns_an_error(tmp_path):
    packages, driver, stub = (tmp_path / name for name in ("packages", "driver", "stub"))
    for folder in (packages, driver, stub):
        folder.mkdir()
    library(driver / "libcuda.so.1", "int cuInit(void) { return 0; }", "-Wl,-soname,libcuda.so.1")
    library(
        packages / "a.so", "int cuInit(void); int f(void) { return cuInit(); }", str(driver / "libcuda.so.1")
    )
    library(packages / "b.so", "int cuOther(void); int f(void) { return cuOther(); }")  # needs no driver
    assert stand_ins.write_stub([packages], stub) == 1
    assert ctypes.CDLL(str(stub / "libcuda.so.1")).cuInit() == stand_ins.STUB_LIBRARY


def test_every_family_has_a_model(tmp_path):
    folders = [models.write_config(tmp_path, family) for family in models.FAMILIES]
    kinds = {json.loads((folder / "config.json").read_text())["model_type"] for folder in folders}
    assert kinds == set(families())
    assert set(models.WITH_EXPERTS) == {"qwen3_moe", "mixtral", "qwen3.5_moe", "qwen3_next", "gpt_oss"}


def test_the_exit_status_is_the_number_of_failed_checks(tmp_path):
    """The packages of this environment are not those of the GPU's."""
    results = tmp_path / "checks.json"
    line = [sys.executable, str(TOOL), "--only", "installed", "--json", str(results)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=240)
    failed = [result for result in json.loads(results.read_text()) if not result["passed"]]
    assert "versions" in {result["check"] for result in failed}, done.stdout
    assert done.returncode == len(failed), done.stderr
    assert "FAILED" in done.stdout


def test_only_an_override_may_contradict_what_a_package_asks_for():
    cudnn = "torch 2.13.0 has requirement nvidia-cudnn-cu13==9.20.0.48, but you have nvidia-cudnn-cu13 "
    other = "a 1.0 has requirement b==1, but you have b 2."
    assert installed.unexpected(f"{cudnn}9.22.0.52.\n{other}\n") == [other]
    assert installed.unexpected(f"{cudnn}9.21.0.82.") == [f"{cudnn}9.21.0.82."]
