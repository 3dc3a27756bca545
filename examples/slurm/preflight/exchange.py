"""What a rank measures, with a deadline for each measurement, and how the first rank collects it.

Ranks do not exchange their reports with collectives, because a collective waits for every rank and does not
say which one is missing. Here the first rank waits until a deadline, and continues with the reports that it
has.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from megatron_stppo.parallel.collectives import decode, encode

Value = TypeVar("Value")
GRACE = 30.0  # seconds that the other ranks wait for the first one beyond its own deadlines


@dataclass
class RankReport:
    """What one rank has measured so far, and what went wrong.

    Example: RankReport("b", [("min_write", "b", 0.1)], {"version of torch": "2.13.0"}, {"GPU": "lost"}).
    """

    node: str
    numbers: list[tuple[str, str, float]] = field(default_factory=list)  # (limit, of whom, value)
    texts: dict[str, str] = field(default_factory=dict)  # {what must be equal on all ranks: value}
    faults: dict[str, str] = field(default_factory=dict)  # {measurement: why it failed, or what it found}

    def run(self, name: str, seconds: float, measure: Callable[..., object], *arguments: Any) -> None:
        """Call measure(self, *arguments), which adds to this report. An error, or no end within `seconds`,
        becomes a fault.

        A measurement that hangs is left behind in its thread: a file system or a collective that does not
        answer cannot be interrupted.
        """

        def target() -> None:
            try:
                measure(self, *arguments)
            except Exception as error:  # the rank must still report everything else
                self.faults[name] = f"{type(error).__name__}: {error}"

        thread = threading.Thread(target=target, daemon=True)
        thread.start()
        thread.join(seconds)
        if thread.is_alive():
            self.faults[name] = f"no result within {seconds:g} s"

    def copy(self) -> RankReport:
        """Return a report that a measurement which hangs no longer changes."""
        return RankReport(self.node, list(self.numbers), dict(self.texts), dict(self.faults))


@dataclass(frozen=True)
class Board:
    """The store of the rendezvous, as one rank of `world` sees it. A wait takes at most `seconds`."""

    store: dist.Store
    rank: int
    world: int
    seconds: float

    def collect(self, name: str, own: RankReport) -> dict[int, RankReport]:
        """Publish `own`. Return {rank: report} of all ranks that published theirs in time, on the first rank.

        On the other ranks the result is empty, and nothing waits.
        """
        self._set(f"{name}/{self.rank}", encode(own.copy()))
        reports: dict[int, RankReport] = {}
        deadline = time.monotonic() + self.seconds
        for rank in range(self.world) if self.rank == 0 else ():
            payload = self._get(f"{name}/{rank}", max(0.1, deadline - time.monotonic()))
            if payload is not None:
                reports[rank] = decode(payload, RankReport)
        return reports

    def announce(self, name: str, value: Value, type: type[Value], waits: int = 1) -> Value:
        """Return the first rank's `value` on every rank.

        waits: how many deadlines may pass on the first rank before.
        Raises TimeoutError on the other ranks if the first rank does not answer.
        """
        if self.rank == 0:
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
