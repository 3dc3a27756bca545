"""Run a command, show its output immediately, and keep it in a file."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from megatron_stppo.base.printing import Droppable
from megatron_stppo.cluster.preemption import passed_on


def forward(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> int:
    """Run the command and return its exit status.

    If the output is a terminal, the command gets a terminal too, so that its progress bars move. Signals to
    this process are passed on to the command, whose output is read until it has ended.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    if sys.stdout.isatty():
        reader, writer = pty.openpty()
        os.set_inheritable(writer, True)
    else:
        reader, writer = os.pipe()
    start = partial(
        subprocess.Popen[bytes],
        command,
        stdin=subprocess.DEVNULL,
        stdout=writer,
        stderr=writer,
        env=dict(environment),
        start_new_session=True,
    )
    with Droppable(log, "wb") as file, passed_on(start) as process:
        os.close(writer)
        while chunk := read(reader):
            file.write(chunk)
            sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
        os.close(reader)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def read(descriptor: int) -> bytes:
    """Read up to 64 KiB. Return b"" at the end, which a terminal reports as an OSError."""
    try:
        return os.read(descriptor, 65536)
    except OSError:
        return b""
