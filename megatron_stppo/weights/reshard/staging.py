"""Buffers that hold the rows of two buckets while they are exchanged, and the copies into and out of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_stppo.ops.bucket_copy import BucketCopy, expressible
from megatron_stppo.weights.reshard.merging import Computed, Term, computed
from megatron_stppo.weights.reshard.plan import RowCopy
from megatron_stppo.weights.reshard.verify import Summed


@dataclass(frozen=True)
class BucketSlice:
    """The place of a copy in a buffer, in bytes, and the view that it is packed from or unpacked into."""

    copy: RowCopy
    view: Tensor
    dtype: torch.dtype  # the target's
    start: int
    term: Term | None = None  # of an adapter, in a view that is packed from

    @property
    def stop(self) -> int:
        return self.start + self.view.numel() * self.dtype.itemsize

    def of(self, buffer: Tensor) -> Tensor:
        return buffer[self.start : self.stop].view(self.dtype).view(self.view.shape)


@dataclass(frozen=True)
class Bucket:
    """This rank's part of one exchange. Splits are bytes per rank of the group."""

    sends: list[BucketSlice]
    receives: list[BucketSlice]
    send_splits: list[int]
    receive_splits: list[int]


class Copies:
    """Copies between pairs (source, target) of views, prepared once, and rows that are computed (merging.py).

    Each call makes all copies in a few kernels, and then computes rows.
    Views that ops.bucket_copy does not support (types other than float32 and bfloat16) are copied one by one.
    """

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]], rows: Iterable[Computed] = ()) -> None:
        self._rows = list(rows)
        known: list[tuple[Tensor, Tensor]] = []
        self._others: list[tuple[Tensor, Tensor]] = []
        for source, target in pairs:
            both = expressible(source) and expressible(target)
            (known if both else self._others).append((source, target))
        self._known = BucketCopy([source for source, _ in known], [target for _, target in known])

    def __call__(self) -> None:
        self._known()
        for source, target in self._others:
            target.copy_(source)
        for write in self._rows:
            write()


class Staging:
    """Two pairs of byte buffers, used alternately, and the copies between them and the tensors.

    The copies of a bucket are prepared when the bucket is first used.
    """

    def __init__(self, buckets: list[Bucket], device: torch.device) -> None:
        def two(sizes: list[int]) -> list[Tensor]:
            return [torch.empty(max(sizes, default=0), dtype=torch.uint8, device=device) for _ in range(2)]

        self._buckets = buckets
        self._send = two([sum(bucket.send_splits) for bucket in buckets])
        self._receive = two([sum(bucket.receive_splits) for bucket in buckets])
        self._packs: dict[int, Copies] = {}
        self._packed: dict[int, Summed] = {}
        self._unpacks: dict[int, Copies] = {}

    def send(self, index: int) -> Tensor:
        """Return the buffer of the bytes that bucket `index` sends."""
        return self._send[index % 2][: sum(self._buckets[index].send_splits)]

    def receive(self, index: int) -> Tensor:
        """Return the buffer that receives bucket `index`."""
        return self._receive[index % 2][: sum(self._buckets[index].receive_splits)]

    def pack(self, index: int) -> None:
        """Fill `send(index)` from the source tensors."""
        if index not in self._packs:
            buffer, sends = self._send[index % 2], self._buckets[index].sends
            self._packs[index] = Copies(
                ((s.view, s.of(buffer)) for s in sends if s.term is None),
                (computed(s.copy, s.view, s.term, s.of(buffer)) for s in sends if s.term is not None),
            )
        self._packs[index]()

    def packed(self, index: int) -> Summed:
        """Return the copies in `send(index)`, to be summed now: merged rows in the buffer, others in their
        sources."""
        if index not in self._packed:
            buffer, sends = self._send[index % 2], self._buckets[index].sends
            views = [s.view if s.term is None else s.of(buffer) for s in sends]
            self._packed[index] = Summed([s.copy for s in sends], views, [s.dtype for s in sends])
        return self._packed[index]

    def unpack(self, index: int) -> None:
        """Write `receive(index)` into the target tensors."""
        if index not in self._unpacks:
            received = self._receive[index % 2]
            self._unpacks[index] = Copies((s.of(received), s.view) for s in self._buckets[index].receives)
        self._unpacks[index]()
