"""The installed packages are those of tools/constraints-gpu.txt, and fit together."""

from __future__ import annotations

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


def versions() -> str:
    pins = {}
    for line in CONSTRAINTS.read_text().splitlines():
        name, _, version = line.partition("#")[0].strip().partition("==")
        pins[_plain(name)] = version
    found = {_plain(one.metadata["Name"]): one.version for one in metadata.distributions()}
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


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
