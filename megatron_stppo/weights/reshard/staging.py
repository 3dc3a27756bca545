"""Buffers that hold the rows of two buckets while they are exchanged, and the copies into and out of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_stppo.ops.bucket_copy import BucketCopy, expressible
from megatron_stppo.weights.reshard.merging import Move, Term
from megatron_stppo.weights.reshard.plan import RowCopy
from megatron_stppo.weights.reshard.verify import Summed


@dataclass(frozen=True)
class BucketSlice:
    """The place of a copy in a buffer, in bytes, and the view that it is packed from or unpacked into."""

    copy: RowCopy
    view: Tensor
    dtype: torch.dtype  # the target's
    start: int
    term: Term | None  # of an adapter, in a view that is packed from

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
    unmerged: Summed | None  # the sends in their sources; None if a term is added to some of them
    send_splits: list[int]
    receive_splits: list[int]


class Copies:
    """Moves of rows, prepared once. Each call makes all copies in a few kernels, and then computes rows.

    Views that ops.bucket_copy does not support (types other than float32 and bfloat16) are copied one by one.
    """

    def __init__(self, moves: Iterable[Move]) -> None:
        known: list[Move] = []
        self._others: list[Move] = []
        self._computed: list[Move] = []
        for move in moves:
            if move.term is not None:
                self._computed.append(move)
            else:
                both = expressible(move.source) and expressible(move.target)
                (known if both else self._others).append(move)
        self._known = BucketCopy([move.source for move in known], [move.target for move in known])

    def __call__(self) -> None:
        self._known()
        for move in self._others:
            move.target.copy_(move.source)
        for move in self._computed:
            move.compute()


class Staging:
    """Two pairs of byte buffers, used alternately, and the copies between them and the tensors.

    The copies of a bucket are prepared when the bucket is first used. at_once: every bucket that is sent has
    a buffer of its own, so that all can be packed before any is sent.
    """

    def __init__(self, buckets: list[Bucket], device: torch.device, at_once: bool = False) -> None:
        def allocate(sizes: list[int]) -> list[Tensor]:
            return [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]

        self._buckets = buckets
        sent = [sum(bucket.send_splits) for bucket in buckets]
        self._send = allocate(sent if at_once and sent else [max(sent, default=0)] * 2)
        received = [sum(bucket.receive_splits) for bucket in buckets]
        self._receive = allocate([max(received, default=0)] * 2)
        self._packs: dict[int, tuple[Copies, Summed]] = {}
        self._unpacks: dict[int, Copies] = {}

    def send(self, index: int) -> Tensor:
        """Return the buffer of the bytes that bucket `index` sends."""
        return self._send[index % len(self._send)][: sum(self._buckets[index].send_splits)]

    def receive(self, index: int) -> Tensor:
        """Return the buffer that receives bucket `index`."""
        return self._receive[index % 2][: sum(self._buckets[index].receive_splits)]

    def pack(self, index: int) -> Summed:
        """Fill `send(index)` from the source tensors.

        Return its copies, to be summed now: merged rows in the buffer, others in their sources.
        """
        if index not in self._packs:
            buffer, bucket = self.send(index), self._buckets[index]
            moves = [Move(s.copy, s.view, s.of(buffer), s.term) for s in bucket.sends]
            self._packs[index] = Copies(moves), bucket.unmerged or Summed.where_written(moves)
        copies, summed = self._packs[index]
        copies()
        return summed

    def unpack(self, index: int) -> None:
        """Write `receive(index)` into the target tensors."""
        if index not in self._unpacks:
            received = self._receive[index % 2]
            self._unpacks[index] = Copies(
                Move(s.copy, s.of(received), s.view) for s in self._buckets[index].receives
            )
        self._unpacks[index]()
