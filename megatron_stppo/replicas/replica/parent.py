"""Ends a replica soon after the trainer that has started it, also while it imports vLLM or builds its engine.

A replica that plays detects this itself (news.py), and ends normally.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

LOOK = 0.5  # seconds between two checks
GRACE = 5.0  # seconds that a replica has to end normally
PR_SET_PDEATHSIG = 1  # of prctl(2): the signal that this process gets when the thread that started it ends


def has_ended(parent: int | None) -> bool:
    """Return whether the trainer that has started this process has ended; False if none has."""
    return parent is not None and os.getppid() != parent


def watch(parent: int) -> None:
    """Start a thread that ends this process at most LOOK + GRACE seconds after its parent.

    Until `end_normally` is called, the system kills the process at once: loading a large library holds
    Python's lock, for a minute or more from a slow disk, and no thread can run meanwhile.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    threading.Thread(target=_wait, args=(parent,), name="parent", daemon=True).start()


def end_normally() -> None:
    """Leave the end of this process to itself. Called when everything is imported."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0, 0, 0, 0)


def _wait(parent: int) -> None:
    while not has_ended(parent):
        time.sleep(LOOK)
    time.sleep(GRACE)
    print(f"megatron-stppo: the trainer, process {parent}, has ended", file=sys.stderr, flush=True)
    os._exit(1)
