"""The exchange of records through the store of the rendezvous, and deadlines for measurements.

Ranks do not exchange their records with collectives, because a collective waits for every rank and does not
say which one is missing. Here the first rank waits until a deadline, and continues with the records that it
has.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from megatron_stppo.parallel.collectives import decode, encode

Value = TypeVar("Value")
GRACE = 30.0  # seconds that the other ranks wait for the first one beyond its own deadlines


@dataclass(frozen=True)
class Board:
    """The store, as one rank of `world` sees it. A wait takes at most `seconds`."""

    store: dist.Store
    rank: int
    world: int
    seconds: float

    def collect(self, name: str, own: Value, type: type[Value]) -> dict[int, Value]:
        """Publish `own`. Return {rank: record} of all ranks that published theirs in time, on the first rank.

        On the other ranks the result is empty, and nothing waits.
        """
        self._set(f"{name}/{self.rank}", encode(own))
        if self.rank:
            return {}
        found, deadline = {}, time.monotonic() + self.seconds
        for rank in range(self.world):
            payload = self._get(f"{name}/{rank}", max(0.1, deadline - time.monotonic()))
            if payload is not None:
                found[rank] = decode(payload, type)
        return found

    def announce(self, name: str, value: Value | None, type: type[Value], waits: int = 1) -> Value:
        """Return the first rank's `value` on every rank.

        waits: how many deadlines may pass on the first rank before.
        Raises TimeoutError on the other ranks if the first rank does not answer.
        """
        if self.rank == 0:
            assert value is not None
            self._set(name, encode(value))
            return value
        payload = self._get(name, waits * self.seconds + GRACE)
        if payload is None:
            raise TimeoutError(f"rank {self.rank}: the first rank did not answer ({name})")
        return decode(payload, type)

    def leave(self, others: Iterable[int]) -> None:
        """Keep the store, which the first rank holds, until `others` need it no more; at most 10 s."""
        self._set(f"left/{self.rank}", b"")
        deadline = time.monotonic() + 10
        for rank in others if self.rank == 0 else ():
            self._get(f"left/{rank}", max(0.01, deadline - time.monotonic()))

    def _set(self, key: str, value: bytes) -> None:
        self.store.set(key, value)  # type: ignore[arg-type]  # torch's stub has str, its function takes both

    def _get(self, key: str, seconds: float) -> bytes | None:
        try:
            self.store.wait([key], timedelta(seconds=seconds))
        except RuntimeError:  # a timeout, or the store is gone together with the first rank
            return None
        return bytes(self.store.get(key))


class Measurements:
    """Runs measurements one after the other; each ends with a value, or with an entry in `errors`."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.errors: dict[str, str] = {}
        self.hanging = False  # whether a measurement still runs after its deadline, in its thread

    def run(self, name: str, measure: Callable[[], Value]) -> Value | None:
        """Return the value of `measure`, or None after an error, or after `seconds`.

        A measurement that hangs is left behind in its thread: a file system or a collective that does not
        answer cannot be interrupted.
        """
        value: list[Value] = []

        def target() -> None:
            try:
                value.append(measure())
            except Exception as error:  # the rank must still report everything else
                self.errors[name] = f"{type(error).__name__}: {error}"

        thread = threading.Thread(target=target, daemon=True)
        thread.start()
        thread.join(self.seconds)
        if thread.is_alive():
            self.hanging = True
            self.errors[name] = f"no result within {self.seconds:g} s"
        return value[0] if value else None
