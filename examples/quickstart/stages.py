"""Run a command, show its output immediately, and keep it in a file."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def forward(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> int:
    """Run the command and return its exit status.

    If the output is a terminal, the command gets a terminal too, so that its progress bars move.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    if sys.stdout.isatty():
        reader, writer = pty.openpty()
        os.set_inheritable(writer, True)
    else:
        reader, writer = os.pipe()
    with (
        log.open("wb") as file,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=writer, stderr=writer, env=dict(environment)
        ) as process,
    ):
        os.close(writer)
        try:
            while chunk := read(reader):
                file.write(chunk)
                sys.stdout.buffer.write(chunk)
                sys.stdout.buffer.flush()
        except KeyboardInterrupt:
            process.terminate()  # torchrun forwards the signal to its ranks
            raise
        finally:
            os.close(reader)
    return process.returncode


def read(descriptor: int) -> bytes:
    """Read up to 64 KiB. Return b"" at the end, which a terminal reports as an OSError."""
    try:
        return os.read(descriptor, 65536)
    except OSError:
        return b""
