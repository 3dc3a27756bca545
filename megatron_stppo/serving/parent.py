"""Ends a replica soon after the trainer that has started it, also while it imports vLLM or builds its engine.

A replica that plays detects this itself (inbox.py), and ends normally.
"""

from __future__ import annotations

import os
import sys
import threading
import time

LOOK = 0.5  # seconds between two checks
GRACE = 5.0  # seconds that a replica has to end normally


def has_ended(parent: int | None) -> bool:
    """Return whether the trainer that has started this process has ended; False if none has."""
    return parent is not None and os.getppid() != parent


def watch(parent: int) -> None:
    """Start a thread that ends this process at most LOOK + GRACE seconds after its parent."""
    threading.Thread(target=_wait, args=(parent,), name="parent", daemon=True).start()


def _wait(parent: int) -> None:
    while not has_ended(parent):
        time.sleep(LOOK)
    time.sleep(GRACE)
    print(f"megatron-stppo: the trainer, process {parent}, has ended", file=sys.stderr, flush=True)
    os._exit(1)
