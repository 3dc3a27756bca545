"""Run the steps of a Dockerfile, as far as this is possible without Docker, root and a GPU.

    python tools/check_dockerfile.py --python PYTHON3.12 [--folder SCRATCH]

A folder replaces the image's file system. COPY copies files. A RUN step is split at &&, and each command runs
unchanged, with two exceptions:

    - Packages that are too large to install are only resolved by pip. This checks that their versions exist
      and fit together.
    - Commands that need root or torch's CUDA build are skipped and reported.

Our extension is compiled for the architectures of the image, which needs nvcc. The script needs a package
index and, of Python, only the standard library.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Folders of the image that the steps use; they are replaced by folders in the scratch folder.
INSIDE = r"(?<![\w./$])/(opt|wheels|source|home)\b"
NOT_RUN = {
    "apt-get": "installs Ubuntu's packages, as root",
    "/var/lib/apt": "belongs to apt-get",
    "useradd": "makes a user, as root",
    "chown": "needs that user",
    "transformer-engine-torch": "compiles against torch's CUDA build and cuDNN",
}
RESOLVED = ("torch vllm", "*.whl", "/opt/overrides.txt")  # gigabytes


@dataclass(frozen=True)
class Step:
    """One instruction. Example: Step("engine", "COPY", "csrc csrc")."""

    stage: str
    instruction: str
    argument: str


def steps(text: str) -> list[Step]:
    """Return the instructions in order, with continued lines joined and without comments."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    found, stage = [], ""
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        instruction, _, argument = line.strip().partition(" ")
        if instruction == "FROM":
            stage = argument.partition(" AS ")[2] or "image"
        if instruction:
            found.append(Step(stage, instruction, argument.strip()))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the Dockerfile's steps in a folder; see the docstring.")
    parser.add_argument("--python", default="python3.12", help="takes the place of the image's python3.12")
    parser.add_argument("--folder", type=Path, help="scratch folder; default: a temporary one")
    given = parser.parse_args()
    python = shutil.which(given.python)
    if python is None:
        parser.error(f"--python={given.python}: not found; give the path of a Python 3.12")
    with tempfile.TemporaryDirectory() as temporary:
        return Image((given.folder or Path(temporary)).resolve(), python).build(
            (ROOT / "Dockerfile").read_text(encoding="utf-8")
        )


class Image:
    """A folder in place of an image. All stages share it, because none removes files that another needs."""

    def __init__(self, root: Path, python: str) -> None:
        self._root, self._python = root, python
        self._workdir = root

    def build(self, dockerfile: str) -> int:
        """Run all steps and return the number of commands that failed."""
        environment, stages, failed = dict(os.environ), {"": dict(os.environ)}, 0
        for step in steps(dockerfile):
            if step.instruction == "FROM":
                environment = dict(stages.get(step.argument.split()[0], stages[""]))
                stages[step.stage], self._workdir = environment, self._root
            elif step.instruction in ("ENV", "ARG"):
                for pair in step.argument.split():
                    name, _, value = pair.partition("=")
                    environment[name] = expanded(self._inside(value), environment)
            elif step.instruction == "WORKDIR":
                self._workdir = Path(self._inside(step.argument))
                self._workdir.mkdir(parents=True, exist_ok=True)
            elif step.instruction == "COPY":
                self._copy(step.argument)
            elif step.instruction == "RUN":
                failed += sum(not self._run(command, step.stage, environment) for command in commands(step))
        return failed

    def _inside(self, text: str) -> str:
        return re.sub(INSIDE, rf"{self._root}/\1", text)

    def _copy(self, argument: str) -> None:
        if argument.startswith("--from="):
            return
        *sources, target = argument.split()
        for source in sources:
            place = self._workdir / self._inside(target)
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, place, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
            else:
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, place)

    def _run(self, command: str, stage: str, environment: dict[str, str]) -> bool:
        said = f"{stage}: {command if len(command) < 100 else command[:97] + '...'}"
        for part, reason in NOT_RUN.items():
            if part in command:
                print(f"not run   {said}\n          {reason}", flush=True)
                return True
        verb = "ran"
        if any(part in command for part in RESOLVED):
            verb, command = "resolved", command.replace("pip install", "pip install --dry-run --quiet")
        command = self._inside(command).replace("python3.12", self._python)
        start = time.monotonic()
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=self._workdir,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
        )
        seconds = time.monotonic() - start
        print(f"{verb if done.returncode == 0 else 'FAILED':9} {said}   {seconds:.0f} s", flush=True)
        if done.returncode:
            print(done.stdout[-3000:], file=sys.stderr)
        return done.returncode == 0


def expanded(value: str, environment: dict[str, str]) -> str:
    """Return a value with the variables in it replaced. Example: "/root/lib:" for "$HOME/lib:$NOT_SET"."""
    return re.sub(r"\$(\w+)", lambda match: environment.get(match[1], ""), value)


def commands(step: Step) -> list[str]:
    return re.split(r"\s*&&\s*", step.argument)


if __name__ == "__main__":
    sys.exit(min(main(), 1))
