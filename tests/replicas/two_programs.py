"""Programs with default process groups of their own, on real ranks over gloo: a trainer and its replicas."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.ranks import run_ranks

Programs = dict[str, tuple[Callable[..., Any], int, tuple[Any, ...]]]  # {name: (function, ranks, arguments)}
PATIENCE = 60.0  # seconds until a note of the other program must be there


def run_programs(programs: Programs) -> dict[str, Future[list[Any]]]:
    """Run the programs at the same time, and return the results of their ranks when all have ended."""
    with ThreadPoolExecutor(len(programs)) as threads:
        return {
            name: threads.submit(run_ranks, function, world, *given, timeout=120)
            for name, (function, world, given) in programs.items()
        }


def post(folder: Path, name: str, text: str = "") -> None:
    """Write a note for the other program."""
    (folder / f"{name}.new").write_text(text, encoding="utf-8")
    os.replace(folder / f"{name}.new", folder / name)


def await_note(folder: Path, name: str) -> str:
    """Return the text of a note, as soon as it is there."""
    deadline = time.monotonic() + PATIENCE
    while not (folder / name).exists():
        assert time.monotonic() < deadline, f"no program posted {name}"
        time.sleep(0.01)
    return (folder / name).read_text(encoding="utf-8")
