"""Counts the bytes of tensors that are alive, and their peak, while torch runs: on any device.

Apart from plan/meter.py on purpose: what that says of a step is held against what this counts in a real one.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Peak(TorchDispatchMode):
    """Bytes of storages made inside that were alive at once. What existed before does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.alive, self.peak = 0, 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {
            x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage(), before)
        return out

    def _count(self, storage: torch.UntypedStorage, before: set[int]) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in before or key in self._seen:
            return
        self._seen.add(key)
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.alive -= size
