"""Notices on the trainer's store that a link over which weights go has failed.

Ranks look for the notice of their link while they wait for the other program. The first rank that fails
writes it, or the trainer's first rank when it finds out in another way that a replica has died.
"""

from __future__ import annotations

import contextlib

import torch.distributed as dist


def tell_lost(store: dist.Store, group: str, why: str) -> None:
    """Make all ranks of both programs raise that are in a method of the link `group`, or enter one.

    Any thread may call it, with a connection to the store in which no other thread waits.
    """
    with contextlib.suppress(RuntimeError):  # the store ends with the trainer
        store.set(_key(group), why)


def why_lost(store: dist.Store, group: str) -> str:
    """Return the reason that tell_lost() was given for this group, or "". It does not wait."""
    key = _key(group)
    try:
        return store.get(key).decode(errors="replace") if store.check([key]) else ""
    except RuntimeError as error:
        return f"the trainer's store is gone: {error}"


def _key(group: str) -> str:
    return f"lost/{group}"
