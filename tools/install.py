"""Install a lock file with several pip processes at once, because each is limited by one core.

    .venv/bin/python tools/install.py tools/lock-cpu.txt

The result is the same as that of `pip install --no-deps -r tools/lock-cpu.txt`, in about half the time. For
indexes, proxies and certificates, pip reads its own configuration and PIP_* variables. The script needs only
the standard library.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

# Byte code is written when a module is first imported. Most installed modules are never imported.
PIP = ("-m", "pip", "install", "--no-deps", "--no-compile", "--prefer-binary", "--progress-bar", "off")
STARTED = ("Collecting ", "Requirement already satisfied: ")


def main(lock: Path, processes: int) -> int:
    """Install everything and return pip's exit status. If a pip process fails, print its last lines."""
    requirements = read(lock)
    shares = [requirements[i::processes] for i in range(processes)]
    report = Report(len(requirements))
    print(f"installing {len(requirements)} packages, {processes} pip processes", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        workers = [Worker(share, Path(folder) / f"{i}.txt", report) for i, share in enumerate(shares)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    return max(worker.status for worker in workers)


def read(lock: Path) -> list[str]:
    """Return the requirements in the file's order: largest first, so that they can be assigned in turn."""
    lines = (line.partition("#")[0].strip() for line in lock.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line]


class Report:
    """Print one line per package."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._started, self._lock = total, 0, time.monotonic(), threading.Lock()

    def line(self, text: str, packages: int = 0) -> None:
        with self._lock:
            self._done += packages
            seconds = time.monotonic() - self._started
            print(f"  {seconds:4.0f} s  {self._done:3}/{self._total}  {text}", flush=True)


class Worker(threading.Thread):
    """A thread that runs pip for its share of the requirements."""

    def __init__(self, requirements: Sequence[str], file: Path, report: Report) -> None:
        super().__init__()
        file.write_text("\n".join(requirements) + "\n", encoding="utf-8")
        self._file, self._report = file, report
        self.status = 1

    def run(self) -> None:
        command = [sys.executable, *PIP, "-r", str(self._file)]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8"
        ) as process:
            assert process.stdout is not None
            tail: list[str] = []
            for line in process.stdout:
                tail = [*tail[-15:], line.rstrip()]
                if line.startswith(STARTED):
                    name = line.removeprefix(STARTED[0]).removeprefix(STARTED[1]).split()[0]
                    self._report.line(name, packages=1)
                elif line.startswith("Installing collected packages"):
                    self._report.line("unpacking")
        self.status = process.returncode
        if self.status:
            self._report.line("pip failed:\n" + "\n".join(tail))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), processes=min(4, max(2, os.cpu_count() or 2))))
