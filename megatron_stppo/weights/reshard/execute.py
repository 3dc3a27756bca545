"""Execution of a plan: move its rows between ranks bucket by bucket, each with one all_to_all of bytes.

Each bucket is packed into a byte buffer, exchanged, and unpacked into views of the target tensors. Packing
casts to the type of the target, so float32 master weights are sent as bfloat16, and adds the products of
adapters (staging.py). There are two pairs of buffers. While bucket k is exchanged (NCCL uses its own stream,
gloo its own thread), bucket k-1 is unpacked, a share of the rows that stay on their rank is copied (without a
buffer), and bucket k+1 is packed.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_stppo.weights.reshard.plan import RowCopy, buckets
from megatron_stppo.weights.reshard.staging import Bucket, BucketSlice, Checks, Copies, Move, Staging, Summed
from megatron_stppo.weights.sharding.low_rank import Term

Result = TypeVar("Result")
WORD = 8  # bytes; segments of a buffer are aligned to words, so that any type can be viewed in place


class ErrorHolder:
    """The first error of a rank, held until the last collective has run.

    The other ranks wait in the next collective. A rank that fails must therefore continue to exchange bytes,
    which are then meaningless, and report its error at the end. An instance calls a function and returns its
    result, or stores its error and returns None. Calls after an error do nothing.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __call__(self, function: Callable[..., Result], *args: object) -> Result | None:
        if self.error is None:
            try:
                return function(*args)
            except Exception as error:  # the caller reports it to all ranks after the last collective
                self.error = error
        return None


class Home(NamedTuple):
    """Copies within a rank that are made together, and their checksums at both ends."""

    copies: Copies
    sources: Summed
    targets: Summed


class Packed(NamedTuple):
    """What a rank sends, copied into buffers, and by bucket the copies and their checksums."""

    staging: Staging
    sums: list[tuple[Sequence[RowCopy], Tensor]]


class Exchange:
    """This rank's part of a plan, bound to its tensors.

    copies: the whole plan; ranks count within `group`. dtypes: {(rank, target tensor): type}. widths:
    {hf_key: elements per row}. terms: {(source tensor, hf_key): term} of adapters. over_host: see Staging.
    """

    def __init__(
        self,
        copies: Sequence[RowCopy],
        source: Mapping[str, Tensor],
        target: Mapping[str, Tensor],
        dtypes: Mapping[tuple[int, str], torch.dtype],
        widths: Mapping[str, int],
        terms: Mapping[tuple[str, str], Term],
        *,
        group: dist.ProcessGroup | None,
        device: torch.device,
        bucket_bytes: int,
        over_host: bool = False,
    ) -> None:
        self._group, self._device, self._over_host = group, device, over_host
        self._rank, self._world = dist.get_rank(group), dist.get_world_size(group)
        self._source, self._target, self._terms = source, target, terms

        def row_bytes(copy: RowCopy) -> int:
            return widths[copy.hf_key] * dtypes[copy.target_rank, copy.target].itemsize

        remote = [copy for copy in copies if copy.source_rank != copy.target_rank]
        at_home = [copy for copy in copies if copy.source_rank == copy.target_rank]
        self.bytes_moved = sum(copy.size * row_bytes(copy) for copy in remote)
        self.bytes_self = sum(copy.size * row_bytes(copy) for copy in at_home)
        # Of each bucket, the copies that this rank sends or receives: all of a cluster would take gigabytes.
        self._groups = [
            [copy for copy in group if self._rank in (copy.source_rank, copy.target_rank)]
            for group in buckets(remote, row_bytes, bucket_bytes)
        ]
        # {(rank, target tensor): type} of these copies
        self._dtypes = {
            (copy.target_rank, copy.target): dtypes[copy.target_rank, copy.target]
            for group in self._groups
            for copy in group
        }
        own = [copy for copy in at_home if copy.source_rank == self._rank]
        self._shares = _shares(own, row_bytes, len(self._groups))
        self.buckets: list[Bucket] = []
        self.due: list[Summed] = []  # the copies that must have arrived at the end
        self._home: list[Home] = []
        self._staging: Staging | None = None
        self._addresses: list[int] | None = None  # those to which the views belong

    def prepare(self) -> Staging:
        """Return the buffers that `run` needs, with views of the tensors at their present addresses.

        Not collective: it allocates memory, and a rank without a buffer could not exchange bytes.
        """
        self._look_for_tensors()
        staging = self._staging or Staging(self.buckets, self._device, over_host=self._over_host)
        # On a GPU generation and training need the memory. On a CPU keeping it is cheaper than allocating
        # anew.
        self._staging = None if self._device.type == "cuda" else staging
        return staging

    def _look_for_tensors(self) -> None:
        """Make the views of the tensors at their present addresses."""
        addresses = [tensor.data_ptr() for side in (self._source, self._target) for tensor in side.values()]
        if self._addresses != addresses:
            self._addresses = self._staging = None
            self.buckets = [self._bucket(group) for group in self._groups]
            self._home = [self._at_home(share) for share in self._shares]
            received = [_summed(bucket.receives) for bucket in self.buckets]
            self.due = [*received, *(home.targets for home in self._home)]
            self._addresses = addresses

    @torch.no_grad()
    def pack(self) -> Packed:
        """Copy what this rank sends to the host. Not collective; the copy is complete on return."""
        assert self._over_host, "the thread that sends the copy must not use the GPU"
        self._look_for_tensors()
        staging = Staging(self.buckets, self._device, at_once=True, over_host=True)
        packed = map(staging.pack, range(len(self.buckets)))
        sums = [(summed.copies, summed.sums().cpu()) for summed in packed]
        staging.leave_device()
        return Packed(staging, sums)

    @torch.no_grad()
    def run(
        self,
        staging: Staging,
        guard: ErrorHolder,
        on_bucket: Callable[[int], None],
        checks: Checks,
        packed: Packed | None = None,
    ) -> None:
        """Execute the whole plan. Collective. An error of this rank is stored in `guard`.

        packed: what pack() returned, with the buffers of `staging`.
        """

        def leave(index: int) -> None:
            if packed is None:
                summed = staging.pack(index)
                checks.sent(summed.copies, summed.sums())
            else:
                checks.sent(*packed.sums[index])

        def arrive(work: dist.Work | None, index: int) -> None:
            if work is not None:
                work.wait()
                guard(staging.unpack, index)

        def copy_at_home(home: Home) -> None:
            home.copies()
            checks.sent(home.sources.copies, home.sources.sums())

        travelling: dist.Work | None = None
        for index, bucket in enumerate(self.buckets):
            guard(on_bucket, index)
            guard(leave, index)
            work = dist.all_to_all_single(
                staging.receive(index),
                staging.send(index),
                bucket.receive_splits,
                bucket.send_splits,
                group=self._group,
                async_op=True,
            )
            arrive(travelling, index - 1)
            guard(copy_at_home, self._home[index])
            travelling = work
        arrive(travelling, len(self.buckets) - 1)
        if not self.buckets:
            guard(copy_at_home, self._home[0])

    def _at_home(self, share: list[RowCopy]) -> Home:
        moves = [Move(c, self._source_view(c), self._target_view(c), self._term(c)) for c in share]
        targets = [move.target for move in moves]
        at_end = Summed(share, targets, [target.dtype for target in targets])
        return Home(Copies(moves), Summed.where_written(moves), at_end)

    def _bucket(self, copies: list[RowCopy]) -> Bucket:
        # Both ends sort by the rank of the other and keep the order of the plan within a pair, so that no
        # header is needed.
        sends = sorted((c for c in copies if c.source_rank == self._rank), key=lambda c: c.target_rank)
        receives = sorted((c for c in copies if c.target_rank == self._rank), key=lambda c: c.source_rank)
        out, send_splits = self._segments(
            (c, c.target_rank, self._source_view(c), self._term(c)) for c in sends
        )
        into, receive_splits = self._segments(
            (c, c.source_rank, self._target_view(c), None) for c in receives
        )
        unmerged = None if any(segment.term for segment in out) else _summed(out)
        return Bucket(out, into, unmerged, send_splits, receive_splits)

    def _segments(
        self, copies: Iterable[tuple[RowCopy, int, Tensor, Term | None]]
    ) -> tuple[list[BucketSlice], list[int]]:
        """Return the places of copies (copy, other rank, view, term) in a buffer, and the bytes per rank."""
        segments, splits, start = [], [0] * self._world, 0
        for copy, peer, view, term in copies:
            segment = BucketSlice(copy, view, self._dtypes[copy.target_rank, copy.target], start, term)
            size = -(-(segment.stop - start) // WORD) * WORD
            splits[peer] += size
            start += size
            segments.append(segment)
        return segments, splits

    def _term(self, copy: RowCopy) -> Term | None:
        return self._terms.get((copy.source, copy.hf_key))

    def _source_view(self, copy: RowCopy) -> Tensor:
        return self._source[copy.source].detach().narrow(copy.dim, copy.source_offset, copy.size)

    def _target_view(self, copy: RowCopy) -> Tensor:
        return self._target[copy.target].detach().narrow(copy.dim, copy.target_offset, copy.size)


def _summed(segments: list[BucketSlice]) -> Summed:
    return Summed([s.copy for s in segments], [s.view for s in segments], [s.dtype for s in segments])


def _shares(copies: list[RowCopy], row_bytes: Callable[[RowCopy], int], count: int) -> list[list[RowCopy]]:
    """Split the copies, in order, into `count` (at least one) runs of about equal numbers of bytes."""
    shares: list[list[RowCopy]] = [[] for _ in range(max(count, 1))]
    total, done = sum(copy.size * row_bytes(copy) for copy in copies), 0
    for copy in copies:
        shares[done * len(shares) // total].append(copy)
        done += copy.size * row_bytes(copy)
    return shares
