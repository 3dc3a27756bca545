"""Starts programs for the tools. They end with the tool: after SIGTERM or Ctrl-C none of them goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 10.0  # seconds between SIGTERM and SIGKILL


def run(
    line: Sequence[str | Path],
    environment: Mapping[str, str] | None = None,
    *,
    log: Path | None = None,
    folder: Path = ROOT,
    limit: float | None = None,
) -> None:
    """Run a program to its end. Raises RuntimeError if it fails, or takes longer than `limit` seconds.

    environment: variables that differ from those of this process. log: a file to which its output is added,
    whose last lines the error then has; None: the output of this process.
    """
    with open(log or os.devnull, "ab") as file:
        place, output = file.tell(), file if log else None
        with started(line, cwd=folder, env=variables(environment), stdout=output, stderr=output) as process:
            try:
                status = process.wait(limit)
                problem = f"exit status {status}" if status else ""
            except psutil.TimeoutExpired:
                problem = f"not done after {limit:.0f} s"
    if problem:
        raise RuntimeError(f"{problem}: {line_of(line)}{last_lines(log, place) if log else ''}")


@contextmanager
def started(line: Sequence[str | Path], **settings: Any) -> Iterator[psutil.Popen]:
    """Start a program in a session of its own. The block's end ends those of its processes that are left.

    settings: those of Popen. SIGTERM to this process ends the block, and then this process.
    """
    running, early = list[psutil.Popen](), list[int]()

    def leave(number: int, frame: FrameType | None) -> None:
        if running:
            raise SystemExit(128 + number)
        early.append(number)  # it is being started or ended, which must not be interrupted

    before = signal.signal(signal.SIGTERM, leave)
    try:
        process = psutil.Popen([str(word) for word in line], start_new_session=True, **settings)
        try:
            running.append(process)
            if early:
                raise SystemExit(128 + early[0])
            yield process
        finally:
            running.clear()
            end(tree(process))
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # those whose parent had ended before
    finally:
        signal.signal(signal.SIGTERM, before)
        if early:
            raise SystemExit(128 + early[0])


def end(processes: Sequence[psutil.Process]) -> None:
    """Send SIGTERM, and SIGKILL to those that are left after PATIENCE. Return when all have ended."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    psutil.wait_procs(processes, PATIENCE)
    for (
        process
    ) in processes:  # psutil compares times of start: a number that is used again is another process
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes)


def tree(process: psutil.Process) -> list[psutil.Process]:
    """Return a process and its descendants; nothing after its end."""
    with suppress(psutil.NoSuchProcess):
        return [*process.children(recursive=True), process]
    return []


def variables(more: Mapping[str, str] | None) -> dict[str, str]:
    """Return the variables of this process and `more`, with which a program can import from ROOT."""
    environment = {**os.environ, **(more or {})}
    paths = [environment.get("PYTHONPATH", ""), str(ROOT)]
    return environment | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def line_of(line: Sequence[str | Path]) -> str:
    return " ".join(map(str, line))


def last_lines(log: Path, place: int = 0, most: int = 25) -> str:
    """Return the end of what a program has written to a log from `place` on, for an error."""
    lines = log.read_bytes()[place:].decode(errors="replace").strip().splitlines()
    return "".join(f"\n    {line}" for line in lines[-most:])
