"""The processes of an episode's command, which all end with the episode, also those that left its session.

A process belongs to a command if it is in the command's session, if its environment has the key of the
episode, or if it descends from such a process. One that starts a session of its own, clears its environment
and outlives its parents is not found: only a sandbox with its own process ids ends that one too.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from contextlib import suppress

PATIENCE = 2.0  # seconds for processes to be gone after they were killed
TICKS = os.sysconf("SC_CLK_TCK")  # per second, the unit of the start of a process
log = logging.getLogger(__name__)


def kill(leader: int, key: str, since: float) -> None:
    """Kill the processes of a command, again until none is left, because they may start others meanwhile.

    leader: process id of the command, which leads its session. key: a text that only environments of this
    episode contain. since: seconds of CLOCK_BOOTTIME before which none of them was started.
    """
    deadline = time.monotonic() + PATIENCE
    while left := _running(leader, key.encode(), int((since - 1.0) * TICKS)):
        if time.monotonic() > deadline:
            log.warning("%d processes of a command cannot be killed: %s", len(left), sorted(left)[:5])
            break
        for process in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.005)


def _running(leader: int, key: bytes, since: int) -> set[int]:
    parents: dict[int, int] = {}
    found: set[int] = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        process = int(name)
        with suppress(OSError):  # it has ended, or another user owns it
            # after the program's name in parentheses: state, parent, process group, session, ..., start
            fields = _read(process, "stat").rpartition(b")")[2].split()
            state, parent, session, start = fields[0], int(fields[1]), int(fields[3]), int(fields[19])
            if start < since or state in (b"Z", b"X"):  # it is older, or has ended
                continue
            parents[process] = parent
            if session == leader or key in _read(process, "environ"):
                found.add(process)
    while more := {process for process, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def _read(process: int, name: str) -> bytes:
    with open(f"/proc/{process}/{name}", "rb", buffering=0) as file:
        return file.read()
