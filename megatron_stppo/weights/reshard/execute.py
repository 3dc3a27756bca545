"""Execution of a plan: move its rows between ranks bucket by bucket, each with one all_to_all of bytes.

Each bucket is packed into a byte buffer, exchanged, and unpacked into views of the target tensors. Packing
casts to the type of the target, so float32 master weights are sent as bfloat16, and adds the products of
adapters (merging.py). There are two pairs of buffers. While bucket k is exchanged (NCCL uses its own stream,
gloo its own thread), bucket k-1 is unpacked, a share of the rows that stay on their rank is copied (without a
buffer), and bucket k+1 is packed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_stppo.weights.reshard.merging import Term, computed
from megatron_stppo.weights.reshard.plan import ReshardPlan, RowCopy, buckets
from megatron_stppo.weights.reshard.staging import Bucket, BucketSlice, Copies, Staging
from megatron_stppo.weights.reshard.verify import Checks, Summed

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


class Exchange:
    """This rank's part of a plan, bound to its tensors.

    dtypes: {(rank, target tensor): type}; widths: {hf_key: elements per row}. Ranks count within `group`.
    terms: {(source tensor, hf_key): term} of adapters, which are added to the rows.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        source: Mapping[str, Tensor],
        target: Mapping[str, Tensor],
        dtypes: Mapping[tuple[int, str], torch.dtype],
        widths: Mapping[str, int],
        terms: Mapping[tuple[str, str], Term],
        *,
        group: dist.ProcessGroup | None,
        device: torch.device,
        bucket_bytes: int,
    ) -> None:
        self._group, self._device = group, device
        self._rank, self._world = dist.get_rank(group), dist.get_world_size(group)
        self._source, self._target, self._terms = source, target, terms

        def row_bytes(copy: RowCopy) -> int:
            return widths[copy.hf_key] * dtypes[copy.target_rank, copy.target].itemsize

        remote = [copy for copy in plan.copies if copy.source_rank != copy.target_rank]
        at_home = [copy for copy in plan.copies if copy.source_rank == copy.target_rank]
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
        # The copies that each bucket sends, or None if adapters are added; _arriving: those it receives.
        self._leaving: list[Summed | None] = []
        self._arriving: list[Summed] = []
        self._home: list[Home] = []
        self._staging: Staging | None = None
        self._addresses: list[int] | None = None  # those to which the views belong

    def prepare(self) -> Staging:
        """Return the buffers that `run` needs, with views of the tensors at their present addresses.

        Not collective: it allocates memory, and a rank without a buffer could not exchange bytes.
        """
        if self._addresses != (addresses := self._addresses_now()):
            self._addresses = None
            self._bind()
            self._addresses = addresses
        staging = self._staging or Staging(self.buckets, self._device)
        # On a GPU generation and training need the memory. On a CPU keeping it is cheaper than allocating
        # anew.
        self._staging = None if self._device.type == "cuda" else staging
        return staging

    @torch.no_grad()
    def run(
        self, staging: Staging, guard: ErrorHolder, on_bucket: Callable[[int], None], checks: Checks
    ) -> None:
        """Execute the whole plan. Collective. An error of this rank is stored in `guard`."""
        travelling: dist.Work | None = None
        for index, bucket in enumerate(self.buckets):
            guard(on_bucket, index)
            guard(self._pack, index, staging, checks)
            work = dist.all_to_all_single(
                staging.receive(index),
                staging.send(index),
                bucket.receive_splits,
                bucket.send_splits,
                group=self._group,
                async_op=True,
            )
            self._arrive(travelling, index - 1, staging, guard)
            guard(self._copy_at_home, index, checks)
            travelling = work
        self._arrive(travelling, len(self.buckets) - 1, staging, guard)
        if not self.buckets:
            guard(self._copy_at_home, 0, checks)
        for summed in self._arriving:
            checks.due(summed)

    def _arrive(self, work: dist.Work | None, index: int, staging: Staging, guard: ErrorHolder) -> None:
        if work is not None:
            work.wait()
            guard(staging.unpack, index)

    def _copy_at_home(self, index: int, checks: Checks) -> None:
        home = self._home[index]
        home.copies()
        checks.sent(home.sources)
        checks.due(home.targets)

    def _pack(self, index: int, staging: Staging, checks: Checks) -> None:
        staging.pack(index)
        unmerged = self._leaving[index]
        checks.sent(staging.packed(index) if unmerged is None else unmerged)

    def _bind(self) -> None:
        """Make views of the tensors at their present addresses."""
        self._staging = None
        self.buckets = [self._bucket(group) for group in self._groups]
        self._leaving = [
            None if any(s.term for s in bucket.sends) else _summed(bucket.sends) for bucket in self.buckets
        ]
        self._arriving = [_summed(bucket.receives) for bucket in self.buckets]
        self._home = [self._at_home(share) for share in self._shares]

    def _at_home(self, share: list[RowCopy]) -> Home:
        sources, targets = ([view(c) for c in share] for view in (self._source_view, self._target_view))
        dtypes = [target.dtype for target in targets]
        of_each = list(zip(share, sources, targets, map(self._term, share), strict=True))
        copies = Copies(
            ((source, target) for _, source, target, term in of_each if term is None),
            (
                computed(copy, source, term, target)
                for copy, source, target, term in of_each
                if term is not None
            ),
        )
        # Merged rows exist only in their target, where they are summed when they are written and at the end.
        written = [source if term is None else target for _, source, target, term in of_each]
        return Home(copies, Summed(share, written, dtypes), Summed(share, targets, dtypes))

    def _addresses_now(self) -> list[int]:
        return [tensor.data_ptr() for side in (self._source, self._target) for tensor in side.values()]

    def _bucket(self, copies: list[RowCopy]) -> Bucket:
        # Both ends sort by the rank of the other and keep the order of the plan within a pair, so that no
        # header is needed.
        sends = sorted((c for c in copies if c.source_rank == self._rank), key=lambda c: c.target_rank)
        receives = sorted((c for c in copies if c.target_rank == self._rank), key=lambda c: c.source_rank)
        out, send_splits = self._segments(sends, self._source_view, lambda c: c.target_rank)
        out = [replace(segment, term=self._term(segment.copy)) for segment in out]
        into, receive_splits = self._segments(receives, self._target_view, lambda c: c.source_rank)
        return Bucket(out, into, send_splits, receive_splits)

    def _segments(
        self, copies: list[RowCopy], view: Callable[[RowCopy], Tensor], peer: Callable[[RowCopy], int]
    ) -> tuple[list[BucketSlice], list[int]]:
        segments, splits, start = [], [0] * self._world, 0
        for copy in copies:
            segment = BucketSlice(copy, view(copy), self._dtypes[copy.target_rank, copy.target], start)
            size = -(-(segment.stop - start) // WORD) * WORD
            splits[peer(copy)] += size
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
