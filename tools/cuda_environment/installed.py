"""Check that the installed packages are those of constraints-gpu.txt, fit together, and can plan a run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

CONSTRAINTS = Path(__file__).parents[1] / "constraints-gpu.txt"
NEEDED = ("torch", "vllm", "megatron-core", "transformer-engine-torch", "megatron-stppo")
# not pinned: what venv installs, and the package itself
FREE = {"pip", "megatron-stppo"}


def checks() -> Iterator[tuple[str, Callable[[], str]]]:
    yield "versions", versions
    yield "requirements", requirements


def commands() -> Iterator[tuple[str, Callable[[], str]]]:
    yield "plan without a GPU", plan


def versions() -> str:
    pins = {}
    for line in CONSTRAINTS.read_text().splitlines():
        name, _, version = line.partition("#")[0].strip().partition("==")
        pins[plain(name)] = version
    found = {plain(one.metadata["Name"]): one.version for one in metadata.distributions()}
    missing = [name for name in NEEDED if name not in found]
    assert not missing, f"not installed: {missing}"
    other = {name: version for name, version in found.items() if pins.get(name) != version}
    other = {name: version for name, version in other.items() if name not in FREE}
    assert not other, f"not the pinned versions: {other}"
    python = sys.version.split()[0]
    return f"{len(found)} packages on Python {python}; " + ", ".join(f"{n} {found[n]}" for n in NEEDED[:-1])


def requirements() -> str:
    line = [sys.executable, "-m", "pip", "check"]
    done = subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    return done.stdout.strip()


def plan() -> str:
    """Run `plan`, without the stub of the driver. megatron must not import packages that need a GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    line = [sys.executable, "-m", "megatron_stppo", "plan", "examples/qwen2.5-7b/config.yaml", "--gpus", "8"]
    done = subprocess.run(line, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-2500:]
    return done.stdout.strip().splitlines()[-1]


def plain(name: str) -> str:
    """Return the name of a package as indexes write it. Example: "ml-dtypes" for "ML_dtypes"."""
    return re.sub(r"[-_.]+", "-", name).lower()
