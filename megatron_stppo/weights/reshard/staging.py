"""Copies of rows, the buffers that hold those of two buckets while they are exchanged, and their checksums.

Some rows are computed while they are written: W + scale * B A, so that no merged copy of a model exists, or
scale * B.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_stppo.ops.bucket_checksum import BucketChecksum
from megatron_stppo.ops.bucket_copy import BucketCopy, expressible
from megatron_stppo.ops.extension import to_device
from megatron_stppo.weights.reshard.plan import RowCopy
from megatron_stppo.weights.sharding.low_rank import Scaled, Term

AT_ONCE = 1 << 22  # numbers of a product in memory at a time: 16 MiB


class Move(NamedTuple):
    """One copy of rows (or columns), with the views that it reads and writes.

    Example: rows [[1, 1]] of a weight that has the term b = [[2]], a = [[3, 4]] and scale 1 write [[7, 9]].
    """

    copy: RowCopy
    source: Tensor
    target: Tensor
    term: Term | None = None  # of the whole source tensor; None: the rows are copied

    def compute(self) -> None:
        """Write the rows with their term, computed in float32 and cast once to the type of the target."""
        if isinstance(self.term, Scaled):
            self.target.copy_(self.source.float() * self.term.factor)
            return
        assert self.term is not None
        b, a, first, scale = self.term
        b, a = b.detach(), a.detach().narrow(0, first, b.shape[1])
        if self.copy.dim == 0:
            b = b.narrow(0, self.copy.source_offset, self.copy.size)
        else:
            a = a.narrow(1, self.copy.source_offset, self.copy.size)
        b, a = b.float(), a.float()
        rows, columns = self.source.shape
        step = max(1, AT_ONCE // columns)
        for start in range(0, rows, step):
            part = slice(start, start + step)
            self.target[part].copy_(torch.addmm(self.source[part].float(), b[part], a, alpha=scale))


class Summed:
    """Copies, and the view of each on one side. Their checksums are computed in one call.

    dtypes: the types of the targets, in which the rows are summed on both sides.
    """

    def __init__(
        self, copies: Sequence[RowCopy], views: Iterable[Tensor], dtypes: Iterable[torch.dtype]
    ) -> None:
        self.copies = copies
        self.sums = BucketChecksum(list(views), list(dtypes))  # called, it returns int64 [len(copies)]

    @classmethod
    def where_written(cls, moves: Sequence[Move]) -> Summed:
        """Return moves as they are summed when they are written: computed rows exist only in their target."""
        views = [move.target if move.term else move.source for move in moves]
        return cls([move.copy for move in moves], views, [move.target.dtype for move in moves])


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
    a buffer of its own, so that all can be packed before any is sent. over_host: these buffers are in host
    memory, and a GPU copies rows to and from them by way of a buffer of its own. `pack` and `unpack` wait for
    that.
    """

    def __init__(
        self, buckets: list[Bucket], device: torch.device, at_once: bool = False, over_host: bool = False
    ) -> None:
        self._buckets, self._over_host = buckets, over_host
        sent = [sum(bucket.send_splits) for bucket in buckets]
        most = max(sent, default=0), max((sum(bucket.receive_splits) for bucket in buckets), default=0)
        wire = torch.device("cpu") if over_host else device
        pinned = wire != device
        self._send = _buffers(sent if at_once and sent else [most[0]] * 2, wire, pinned)
        self._receive = _buffers([most[1]] * 2, wire, pinned)
        # what rows are packed into, and unpacked from
        self._packed = _buffers([most[0]], device) if over_host else self._send
        self._arrived = _buffers([most[1]], device) if over_host else self._receive
        self._packs: dict[int, tuple[Copies, Summed]] = {}
        self._unpacks: dict[int, Copies] = {}

    def send(self, index: int) -> Tensor:
        """Return the buffer of the bytes that bucket `index` sends."""
        return _part(self._send, index, self._buckets[index].send_splits)

    def receive(self, index: int) -> Tensor:
        """Return the buffer that receives bucket `index`."""
        return _part(self._receive, index, self._buckets[index].receive_splits)

    def pack(self, index: int) -> Summed:
        """Fill `send(index)` from the source tensors.

        Return its copies, to be summed now: merged rows in the buffer, others in their sources.
        """
        bucket = self._buckets[index]
        buffer = _part(self._packed, index, bucket.send_splits)
        if index not in self._packs:
            moves = [Move(s.copy, s.view, s.of(buffer), s.term) for s in bucket.sends]
            self._packs[index] = Copies(moves), bucket.unmerged or Summed.where_written(moves)
        copies, summed = self._packs[index]
        copies()
        if self._over_host:
            self.send(index).copy_(buffer)
        return summed

    def leave_device(self) -> None:
        """Free the buffer on the device: everything is packed in host memory, and training needs the rest."""
        self._packed, self._packs = [], {}

    def unpack(self, index: int) -> None:
        """Write `receive(index)` into the target tensors."""
        bucket = self._buckets[index]
        if not bucket.receives:  # the thread that sends a copy must not use the GPU
            return
        buffer = _part(self._arrived, index, bucket.receive_splits)
        if index not in self._unpacks:
            self._unpacks[index] = Copies(Move(s.copy, s.of(buffer), s.view) for s in bucket.receives)
        if self._over_host:
            buffer.copy_(self.receive(index))
        self._unpacks[index]()


def _buffers(sizes: Sequence[int], device: torch.device, pinned: bool = False) -> list[Tensor]:
    return [torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pinned) for size in sizes]


def _part(buffers: Sequence[Tensor], index: int, splits: Sequence[int]) -> Tensor:
    """Return the bytes of a bucket in the one of the buffers that it uses."""
    return buffers[index % len(buffers)][: sum(splits)]


class Checks:
    """The checksums of one sync on one rank: of the copies that it sends, and of those that must arrive.

    A copy is summed once at its source, after the cast, and once at its target, after everything is written.
    Both ranks of a pair have the copies between them in the same order. The steps are sent() of each group of
    copies, sum(), exchange() and compare(). device: from which the checksums are exchanged.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group, self._device = group, device
        self._sent: list[tuple[Sequence[RowCopy], Tensor]] = []

    def sent(self, copies: Sequence[RowCopy], sums: Tensor) -> None:
        """Note copies that are sent, and their sums, int64 [len(copies)]."""
        self._sent.append((copies, sums))

    def sum(self, due: Sequence[Summed]) -> None:
        """Sum the copies that must have arrived, after everything is written.

        Not collective. It allocates all memory that `exchange` needs.
        """
        to = [copy.target_rank for copies, _ in self._sent for copy in copies]
        arrived = [copy for summed in due for copy in summed.copies]
        source = [copy.source_rank for copy in arrived]
        self._copies = sorted(arrived, key=lambda copy: copy.source_rank)
        self._found = self._by_rank(source, [summed.sums() for summed in due])
        self._leaving = self._by_rank(to, [sums for _, sums in self._sent])
        self._expected = torch.empty_like(self._found)
        world = range(dist.get_world_size(self._group))
        self._splits = [[count[rank] for rank in world] for count in (Counter(source), Counter(to))]

    def exchange(self) -> None:
        """Get the checksums that the sources' ranks computed. Collective."""
        come, leave = self._splits
        dist.all_to_all_single(self._expected, self._leaving, come, leave, group=self._group)

    def compare(self) -> tuple[list[RowCopy], int, int]:
        """Return (copies that differ on this rank, number of copies compared, sum of the targets'
        checksums)."""
        expected, found = torch.stack([self._expected, self._found]).cpu()  # the host waits once
        differ = (expected != found).nonzero().flatten().tolist()
        return [self._copies[i] for i in differ], len(self._copies), int(found.sum())

    def _by_rank(self, ranks: list[int], sums: list[Tensor]) -> Tensor:
        """Return the sums ordered by rank; sums of the same rank keep their order."""
        order = sorted(range(len(ranks)), key=ranks.__getitem__)
        none = torch.empty(0, dtype=torch.int64, device=self._device)
        together = torch.cat([none, *(of_group.to(self._device) for of_group in sums)])
        return together[to_device(torch.tensor(order, dtype=torch.int64, device="cpu"), self._device)]
