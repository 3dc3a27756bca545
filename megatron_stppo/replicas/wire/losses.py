"""What happens when a link over which weights go has failed (weights.py).

The first rank that fails writes a notice to the trainer's store, or the trainer's first rank if it detects in
another way that a replica has died. Ranks look for the notice of their link while they wait for the other
program. On a replica, the rank that has the error raises it, and the replica ends. The trainer's ranks agree
over their default group, because the trainer continues without the replica.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Mapping

import torch.distributed as dist

from megatron_stppo.base.printing import printable
from megatron_stppo.parallel.raise_together import raise_together


def tell_lost(store: dist.Store, group: str, why: str) -> None:
    """Make each rank of both programs raise an error if it is in a method of the link `group`, or enters one.

    Any thread may call it, with a connection to the store in which no other thread waits.
    """
    with contextlib.suppress(RuntimeError, OSError):  # the store ends with the trainer
        store.set(_key(group), why)


def why_lost(store: dist.Store, group: str) -> str:
    """Return the reason that tell_lost() was given for this group, or "". It does not wait."""
    key = _key(group)
    try:
        return store.get(key).decode(errors="replace") if store.check([key]) else ""
    except (RuntimeError, OSError) as error:
        return f"the trainer's store is gone: {error}"


class LossNotices:
    """Calls `tell` for losses in a thread of its own, because a call may take as long as the store's timeout.

    Example: LossNotices(partial(tell_lost, store)).add("weights-1", "it was asked to end").
    """

    def __init__(self, tell: Callable[[str, str], None]) -> None:
        """tell: called with the group and the reason, for one loss after the other."""
        self._tell = tell
        self._losses: queue.SimpleQueue[tuple[str, str] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="losses", daemon=True).start()

    def add(self, group: str, why: str) -> None:
        """Queue a loss, and return at once."""
        self._losses.put((group, why))

    def close(self) -> None:
        """End the thread after the calls for all losses that were added. Does not wait for it."""
        self._losses.put(None)

    def _run(self) -> None:
        while (loss := self._losses.get()) is not None:
            self._tell(*loss)


def _key(group: str) -> str:
    return f"lost/{group}"


class ReplicaLost(RuntimeError):
    """Weights could not be sent to a replica: it died, did not arrive in time, or its rows are wrong.

    All ranks of the trainer raise it together. The trainer's own groups and its other links still work.
    """


def raise_own(name: str, error: Exception | None) -> None:
    """Raise this rank's error, if there is one. name: that of the link's group."""
    if error is not None:
        raise error


def raise_on_all(name: str, error: Exception | None) -> None:
    """Raise the same ReplicaLost on all ranks of the trainer if any of them has an error. Collective.

    name: that of the link's group.
    """
    own = None
    if error is not None:
        own = printable(f"{type(error).__name__}: {error}").partition("\n")[0]
    raise_together(own, lambda found: _lost(name, found), str)


def _lost(name: str, found: Mapping[int, str]) -> ReplicaLost:
    """Return the exception for ranks that failed with these texts. The first of them stands for all."""
    rank, text = next(iter(found.items()))
    return ReplicaLost(f"weights could not be sent to the replica of group {name}: rank {rank}: {text}")
