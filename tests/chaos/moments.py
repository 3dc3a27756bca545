"""Orders that make a process of a run kill itself in the middle of something.

Weights move for milliseconds, which a kill at a random time seldom meets. So the processes of an attempt
(attempt.py) share memory in which they find orders. The SIGKILL comes at a random time within the moment.
"""

from __future__ import annotations

import functools
import mmap
import os
import signal
import struct
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_stppo.checkpoint import step_folder
from megatron_stppo.checkpoint.writer import Save
from megatron_stppo.replicas.wire.weights import Link

WEIGHTS = "while weights moved"  # also while a link was made
CHECKPOINT = "while a checkpoint was written"
LEDGER = "while the ledger in it was written"  # and its episodes
ORDER = struct.Struct("<BBd")  # number of the moment, 0 for none; whether it was obeyed; part of the moment


def _holds_the_ledger(path: Path, data: bytes) -> bool:
    return path.name in (step_folder.STATE, step_folder.EPISODES)


def _always(*_: object) -> bool:
    return True


# By name: where the function is, its name, and whether a call with these arguments counts.
MOMENTS: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    WEIGHTS: (Link, "_attempt", _always),
    CHECKPOINT: (Save, "run", _always),
    LEDGER: (step_folder, "write_durably", _holds_the_ledger),
}


class Orders:
    """Orders to the processes of an attempt, by their names. Make it before they are forked.

    Example: orders.give("rank-0", LEDGER, 0.5); the next time that rank 0 writes a ledger it dies when half
    of the time has passed that the last one took, and orders.obeyed("rank-0") is true.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._places = {name: place * ORDER.size for place, name in enumerate(names)}
        self._memory = mmap.mmap(-1, len(names) * ORDER.size)

    def give(self, name: str, moment: str, part: float) -> None:
        """part: from 0 to 1, of the moment's length."""
        number, place = [*MOMENTS].index(moment) + 1, self._places[name]
        ORDER.pack_into(self._memory, place, 0, 0, part)
        self._memory[place] = number  # last: from now on the order is followed

    def withdraw(self, name: str) -> None:
        self._memory[self._places[name]] = 0

    def obeyed(self, name: str) -> bool:
        return bool(self._memory[self._places[name] + 1])

    def follow(self, name: str) -> None:
        """Make this process, which has the name, follow its orders."""
        for number, (owner, function, counts) in enumerate(MOMENTS.values(), 1):
            setattr(owner, function, self._watched(name, number, getattr(owner, function), counts))

    def _watched(
        self, name: str, number: int, function: Callable[..., Any], counts: Callable[..., bool]
    ) -> Callable[..., Any]:
        last = 0.0  # seconds that it took

        def die() -> None:
            place = self._places[name]
            self._memory[place] = 0  # it is not for the process that takes this one's place and name
            self._memory[place + 1] = 1
            os.kill(os.getpid(), signal.SIGKILL)

        @functools.wraps(function)
        def watched(*arguments: Any, **named: Any) -> Any:
            nonlocal last
            if not counts(*arguments):
                return function(*arguments, **named)
            ordered, _, part = ORDER.unpack_from(self._memory, self._places[name])
            began = time.monotonic()
            if ordered == number:
                timer = threading.Timer(part * last, die)
                timer.daemon = True
                timer.start()
            try:
                return function(*arguments, **named)
            finally:
                if ordered == number:  # it was shorter than the last one
                    die()
                last = time.monotonic() - began

        return watched
