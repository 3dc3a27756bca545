"""Check that the installed packages are those that tools/ pins, fit together, and can plan a run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

TOOLS = Path(__file__).parents[1]
NEEDED = ("torch", "vllm", "megatron-core", "transformer-engine-torch", "megatron-stppo")
# not pinned: what venv installs, and the package itself
FREE = {"pip", "megatron-stppo"}


def checks() -> Iterator[tuple[str, Callable[[], str]]]:
    yield "versions", versions
    yield "requirements", requirements


def commands() -> Iterator[tuple[str, Callable[[], str]]]:
    yield "plan without a GPU", plan


def pins(file: str) -> dict[str, str]:
    """Return the versions that a file of tools/ pins, by name."""
    lines = [
        line.partition("#")[0].strip() for line in (TOOLS / file).read_text(encoding="utf-8").splitlines()
    ]
    pairs = [line.partition("==") for line in lines if line]
    return {plain(name): version for name, _, version in pairs}


def versions() -> str:
    pinned = pins("constraints-gpu.txt") | pins("overrides-gpu.txt")
    found = {plain(one.metadata["Name"]): one.version for one in metadata.distributions()}
    missing = [name for name in NEEDED if name not in found]
    assert not missing, f"not installed: {missing}"
    other = {name: version for name, version in found.items() if pinned.get(name) != version}
    other = {name: version for name, version in other.items() if name not in FREE}
    assert not other, f"not the pinned versions: {other}"
    python = sys.version.split()[0]
    return f"{len(found)} packages on Python {python}; " + ", ".join(f"{n} {found[n]}" for n in NEEDED[:-1])


def requirements() -> str:
    line = [sys.executable, "-m", "pip", "check"]
    done = subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8")
    wrong = unexpected(done.stdout) if done.returncode else []
    assert not wrong, wrong
    return done.stdout.strip()


def unexpected(output: str) -> list[str]:
    """Return the lines of `pip check` that are not about a version of overrides-gpu.txt."""
    endings = tuple(f"but you have {name} {version}." for name, version in pins("overrides-gpu.txt").items())
    return [line for line in output.strip().splitlines() if not line.endswith(endings)]


def plan() -> str:
    """Run `plan`, without the stub of the driver. megatron must not import packages that need a GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    line = [sys.executable, "-m", "megatron_stppo", "plan", "examples/qwen2.5-7b/config.yaml", "--gpus", "8"]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, (done.stdout + done.stderr)[-2500:]
    return done.stdout.strip().splitlines()[-1]


def plain(name: str) -> str:
    """Return the name of a package as indexes write it. Example: "ml-dtypes" for "ML_dtypes"."""
    return re.sub(r"[-_.]+", "-", name).lower()
