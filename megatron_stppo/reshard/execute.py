"""Moves the rows of a plan between ranks, a bucket at a time, each with one all_to_all of bytes.

Per bucket: pack into a byte buffer (casting to the target's type, so that float32 masters travel as
bfloat16), exchange, unpack into views of the target tensors. Two pairs of buffers: bucket k+1 is packed while
bucket k travels (NCCL runs on its own stream, gloo on its own thread). Rows that stay on their rank are
copied without a buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_stppo.reshard.plan import Copy, Plan, buckets
from megatron_stppo.reshard.verify import Checks

WORD = 8  # segments of a buffer start on whole words, so that any type can be viewed in place


class Guard:
    """Keeps a rank in step after an error of its own.

    The other ranks wait in the next collective, so a rank that fails must go on exchanging (now meaningless)
    bytes, do no more work between the exchanges, and say so at the end. Calls after an error do nothing.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __call__(self, function: Callable[..., None], *args: object) -> None:
        if self.error is None:
            try:
                function(*args)
            except Exception as error:  # reported to all ranks by the caller, after the last collective
                self.error = error


@dataclass(frozen=True)
class Segment:
    """A copy's place in a buffer, in bytes, and the view it is packed from or unpacked into."""

    copy: Copy
    view: Tensor
    dtype: torch.dtype  # the target's
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.view.numel() * self.dtype.itemsize

    def of(self, buffer: Tensor) -> Tensor:
        return buffer[self.start : self.stop].view(self.dtype).view(self.view.shape)


@dataclass(frozen=True)
class Bucket:
    """This rank's part of one exchange; splits are bytes per rank of the group."""

    sends: list[Segment]
    receives: list[Segment]
    send_splits: list[int]
    receive_splits: list[int]


class Exchange:
    """This rank's part of a plan, bound to its tensors.

    dtypes: {(rank, target tensor): type}; widths: {hf_key: elements per row}. Ranks count within `group`.
    """

    def __init__(
        self,
        plan: Plan,
        source: Mapping[str, Tensor],
        target: Mapping[str, Tensor],
        dtypes: Mapping[tuple[int, str], torch.dtype],
        widths: Mapping[str, int],
        *,
        group: dist.ProcessGroup | None,
        device: torch.device,
        bucket_bytes: int,
    ) -> None:
        self._group, self._device = group, device
        self._rank, self._world = dist.get_rank(group), dist.get_world_size(group)
        self._source, self._target, self._dtypes = source, target, dtypes

        def row_bytes(copy: Copy) -> int:
            return widths[copy.hf_key] * dtypes[copy.target_rank, copy.target].itemsize

        remote = [copy for copy in plan.copies if copy.source_rank != copy.target_rank]
        at_home = [copy for copy in plan.copies if copy.source_rank == copy.target_rank]
        self.bytes_moved = sum(copy.size * row_bytes(copy) for copy in remote)
        self.bytes_self = sum(copy.size * row_bytes(copy) for copy in at_home)
        self._at_home = [copy for copy in at_home if copy.source_rank == self._rank]
        self.buckets = [self._bucket(group) for group in buckets(remote, row_bytes, bucket_bytes)]

    @torch.no_grad()
    def run(self, guard: Guard, on_bucket: Callable[[int], None], checks: Checks) -> None:
        """One pass over the whole plan. An error of this rank's own is left in `guard`."""
        guard(self._copy_at_home, checks)
        send, receive = self._buffers("send_splits"), self._buffers("receive_splits")
        travelling: dist.Work | None = None
        for index, bucket in enumerate(self.buckets):
            guard(on_bucket, index)
            guard(self._pack, bucket, send[index % 2], checks)
            work = dist.all_to_all_single(
                receive[index % 2][: sum(bucket.receive_splits)],
                send[index % 2][: sum(bucket.send_splits)],
                bucket.receive_splits,
                bucket.send_splits,
                group=self._group,
                async_op=True,
            )
            self._arrive(travelling, index - 1, receive, guard)
            travelling = work
        self._arrive(travelling, len(self.buckets) - 1, receive, guard)
        for bucket in self.buckets:
            for segment in bucket.receives:
                checks.due(segment.copy, segment.view)

    def _arrive(self, work: dist.Work | None, index: int, receive: list[Tensor], guard: Guard) -> None:
        if work is not None:
            work.wait()
            guard(self._unpack, self.buckets[index], receive[index % 2])

    def _copy_at_home(self, checks: Checks) -> None:
        for copy in self._at_home:
            source, target = self._source_view(copy), self._target_view(copy)
            target.copy_(source)
            checks.sent(copy, source.to(target.dtype))
            checks.due(copy, target)

    def _pack(self, bucket: Bucket, buffer: Tensor, checks: Checks) -> None:
        for segment in bucket.sends:
            packed = segment.of(buffer)
            packed.copy_(segment.view)
            checks.sent(segment.copy, packed)

    def _unpack(self, bucket: Bucket, buffer: Tensor) -> None:
        for segment in bucket.receives:
            segment.view.copy_(segment.of(buffer))

    def _bucket(self, copies: list[Copy]) -> Bucket:
        # Both ends sort by the other's rank and keep the plan's order within a pair: no header is needed.
        sends = sorted((c for c in copies if c.source_rank == self._rank), key=lambda c: c.target_rank)
        receives = sorted((c for c in copies if c.target_rank == self._rank), key=lambda c: c.source_rank)
        out, send_splits = self._segments(sends, self._source_view, lambda c: c.target_rank)
        into, receive_splits = self._segments(receives, self._target_view, lambda c: c.source_rank)
        return Bucket(out, into, send_splits, receive_splits)

    def _segments(
        self, copies: list[Copy], view: Callable[[Copy], Tensor], peer: Callable[[Copy], int]
    ) -> tuple[list[Segment], list[int]]:
        segments, splits, start = [], [0] * self._world, 0
        for copy in copies:
            segment = Segment(copy, view(copy), self._dtypes[copy.target_rank, copy.target], start)
            size = -(-(segment.stop - start) // WORD) * WORD
            splits[peer(copy)] += size
            start += size
            segments.append(segment)
        return segments, splits

    def _source_view(self, copy: Copy) -> Tensor:
        return self._source[copy.source].detach().narrow(copy.dim, copy.source_offset, copy.size)

    def _target_view(self, copy: Copy) -> Tensor:
        return self._target[copy.target].detach().narrow(copy.dim, copy.target_offset, copy.size)

    def _buffers(self, splits: str) -> list[Tensor]:
        size = max((sum(getattr(bucket, splits)) for bucket in self.buckets), default=0)
        return [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(2)]
