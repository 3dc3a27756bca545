"""A cluster of one machine: the sbatch, srun and scontrol in tests/slurm/bin come first on PATH."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SCRIPTS = ROOT / "examples" / "slurm"


@dataclass(frozen=True)
class Job:
    process: subprocess.Popen[bytes]  # sbatch, which ends with the job
    folder: Path  # files of the fake Slurm

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *raised: object) -> None:
        """Kill all processes of the job that still run."""
        if self.process.poll() is None:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            self.process.kill()
            self.process.wait()


def submit(folder: Path, script: Path, *options: str, arguments: Sequence[str] = (), **variables: str) -> Job:
    """Start a job. It runs until an attempt ends without a requeue. arguments: those of the script."""
    folder.mkdir(parents=True)
    path = f"{HERE / 'bin'}:{os.environ['PATH']}"
    known = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    given = {"PATH": path, "FAKE_SLURM": str(folder), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    environment = known | given | variables
    return Job(
        subprocess.Popen(["sbatch", *options, str(script), *arguments], cwd=ROOT, env=environment), folder
    )


def run(
    folder: Path, ends: Sequence[str], *options: str, arguments: Sequence[str] = (), **variables: str
) -> tuple[int, str]:
    """Run a job whose attempts end with "CODE STEP". Return its exit code and its output."""
    (folder / "ends").mkdir(parents=True, exist_ok=True)
    for attempt, end in enumerate(ends):
        (folder / "ends" / str(attempt)).write_text(f"{end}\n")
    given = {"PYTHON": str(HERE / "program"), "ENDS": str(folder / "ends"), "ROOT": str(folder)} | variables
    script = SCRIPTS / "qwen2.5-7b.sbatch"
    with submit(folder / "slurm", script, "--job-name=job", *options, arguments=arguments, **given) as job:
        for attempt in range(len(ends) - 1):
            (job.folder / f"go.{attempt}").touch()
        code = job.process.wait(60)
    return code, (job.folder / "job.out").read_text()
