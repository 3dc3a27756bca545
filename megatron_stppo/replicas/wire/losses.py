"""Notices on the trainer's store that a link over which weights go has failed.

Ranks look for the notice of their link while they wait for the other program. The first rank that fails
writes it, or the trainer's first rank if it detects in another way that a replica has died.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable

import torch.distributed as dist


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
