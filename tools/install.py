"""Install a lock file with several pip processes at once, because each is limited by one core.

    .venv/bin/python tools/install.py tools/lock-cpu.txt

The result is the same as that of `pip install --no-deps -r tools/lock-cpu.txt`, in about half the time. For
indexes, proxies and certificates, pip reads its own configuration and PIP_* variables. The script needs only
the standard library.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# Byte code is written when a module is first imported. Most installed modules are never imported.
PIP = ("-m", "pip", "install", "--no-deps", "--no-compile", "--prefer-binary", "--progress-bar", "off")
STARTED = re.compile(r"(?:Collecting|Requirement already satisfied:) (\S+)|Installing collected packages")


def main(lock: Path, processes: int) -> int:
    """Install everything and return pip's exit status. If a pip process fails, print its last lines."""
    # the file's order is the largest first, so that they can be assigned in turn
    lines = (line.partition("#")[0].strip() for line in lock.read_text(encoding="utf-8").splitlines())
    requirements = [line for line in lines if line]
    print(f"installing {len(requirements)} packages, {processes} pip processes", flush=True)
    report = functools.partial(install, done=itertools.count(1), total=len(requirements))
    with ThreadPoolExecutor(processes) as pool:
        return max(pool.map(report, [requirements[i::processes] for i in range(processes)]))


def install(requirements: Sequence[str], done: Iterator[int], total: int) -> int:
    """Run pip for a share of the requirements, print a line for each, and return pip's exit status."""
    command, tail, begun = [sys.executable, *PIP, *requirements], list[str](), time.monotonic()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8"
    ) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            tail = [*tail[-15:], line.rstrip()]
            if started := STARTED.match(line):
                what = f"{next(done):3}/{total}  {started[1]}" if started[1] else "unpacking"
                print(f"  {time.monotonic() - begun:4.0f} s  {what}", flush=True)
    if pip.returncode:
        print("pip failed:\n" + "\n".join(tail), flush=True)
    return pip.returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), processes=min(4, max(2, os.cpu_count() or 2))))
