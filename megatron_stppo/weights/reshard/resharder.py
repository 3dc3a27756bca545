"""The interface of the reshard for the training loop: sync a version, and return the version that is served.

A sync succeeds on all ranks or fails on all ranks. After an error the engine must not generate, because it
holds rows of two versions and would use them without an error. The remedy is another whole sync.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_stppo.parallel.collectives import all_reduce_sum, by_rank, gather_records, raise_together
from megatron_stppo.weights.reshard.execute import ErrorHolder, Exchange, Packed
from megatron_stppo.weights.reshard.plan import BUCKET_BYTES, PlanError, RowCopy, digest, plan_copies
from megatron_stppo.weights.reshard.staging import Checks
from megatron_stppo.weights.sharding.low_rank import Term
from megatron_stppo.weights.sharding.tiles import PADDING, Spans


class ReshardError(RuntimeError):
    """The engine's weights do not match any version of the trainer's.

    The engine must not generate with them.
    """


@dataclass(frozen=True)
class SyncReport:
    """The result of a sync.

    Example: two ranks, each of which holds half of a 1 MB model and serves all of it: each sends its half to
    the other and copies it to itself, so bytes_moved = bytes_self = 1 MB.
    """

    version: int
    bytes_moved: int  # between ranks, over all ranks; the minimum for this pair of layouts
    bytes_self: int  # copied within a rank, over all ranks
    buckets: int
    compared: int  # copies whose checksums were compared, over all ranks
    checksum: int  # sum of these checksums; equal for equal weights under equal layouts


class Resharder:
    """Writes the trainer's parameters into the engine's parameters, in place.

    source, target: this rank's tensors by name.
    source_layouts, target_layouts: {rank of the group: spans}, equal on all ranks.
    widths: {hf_key: elements per row}.
    terms: {(source tensor, hf_key): term} of this rank's adapters, with which rows are computed while they
    are packed (staging.py): the engine gets W + scale * B A, or scale * B.
    changed: the checkpoint tensors whose rows every version changes; the others are copied by the first sync
    alone. None: every version changes all.
    bucket_bytes: the most bytes that a rank sends at once; default: BUCKET_BYTES of the device.
    on_bucket: called with the index of a bucket before it is packed; an error that it raises fails the sync.
    over_host: rows are exchanged from host memory, over gloo.

    Construction is collective. It raises ReshardError on all ranks if the tensors of any rank do not match
    its layout, or if two ranks made different plans.
    """

    def __init__(
        self,
        source: Mapping[str, Tensor],
        target: Mapping[str, Tensor],
        source_layouts: Mapping[int, Spans],
        target_layouts: Mapping[int, Spans],
        widths: Mapping[str, int],
        terms: Mapping[tuple[str, str], Term] | None = None,
        *,
        changed: Collection[str] | None = None,
        group: dist.ProcessGroup | None = None,
        bucket_bytes: int | None = None,
        ranks_per_node: int = 8,
        on_bucket: Callable[[int], None] = lambda bucket: None,
        over_host: bool = False,
    ) -> None:
        self._group, self._rank = group, dist.get_rank(group)
        self._on_bucket = on_bucket
        self._version, self._reason = -1, "no sync has run yet"
        self._device = next((t.device for t in [*source.values(), *target.values()]), torch.device("cpu"))
        self._wire = torch.device("cpu") if over_host else self._device
        own_source, own_target = (side.get(self._rank, {}) for side in (source_layouts, target_layouts))
        problem = mismatch("source", source, own_source, widths, all_named=False)
        problem += mismatch("target", target, own_target, widths, all_named=True)
        parts = [None] if changed is None else [widths.keys() - changed, changed]
        sides, plans = (source_layouts, target_layouts, widths), list[list[RowCopy]]()
        try:
            for keys in parts:
                plans.append(list(plan_copies(*sides, ranks_per_node=ranks_per_node, keys=keys)))
        except PlanError as error:  # reported to all ranks, because other ranks may have made a plan
            problem += str(error)
        raise_together(problem or None, lambda found: ReshardError(by_rank(found)), str, group)
        dtypes = self._agree(digest(chain(*plans)), target)
        self._padding = _padding(target, own_target)
        # The last one has what every version changes.
        self._exchanges = [
            Exchange(
                plan,
                source,
                target,
                dtypes,
                widths,
                terms or {},
                group=group,
                device=self._device,
                bucket_bytes=bucket_bytes or BUCKET_BYTES[self._device.type],
                over_host=over_host,
            )
            for plan in plans
        ]

    def published(self) -> int:
        """Return the version of the engine's weights.

        Raises ReshardError unless the last sync succeeded on all ranks.
        """
        if self._reason:
            raise ReshardError(f"the engine's weights are poisoned ({self._reason}); run a whole sync first")
        return self._version

    def holds(self, version: int) -> bool:
        """Return whether the engine has all rows of `version`. The same on all ranks."""
        return not self._reason and self._version == version

    def forget(self) -> None:
        """Have the next sync write all rows, because the engine has lost them. Call it on all ranks."""
        self._reason = "the engine has released its memory"

    def pack(self) -> Packed | None:
        """Copy what this rank sends in the next sync to the host; None if that sync writes everything. Not
        collective, and only with over_host.

        The source tensors may change afterwards. The copy can also be sent by another Resharder with the same
        plan, of which a sync has succeeded.
        """
        return None if self._reason else self._exchanges[-1].pack()

    def sync(self, version: int, packed: Packed | None = None) -> SyncReport:
        """Write what version `version` changes, and at first or after an error everything else. Collective.

        packed: what pack() has copied on this rank, to be sent instead of the present rows, without the GPU.
        Raises ReshardError on all ranks if any rank failed or any checksum differs. It is safe to call it
        again.
        """
        due = self._exchanges if self._reason else self._exchanges[-1:]
        assert packed is None or len(due) == 1, "only what every version changes is packed"
        self._reason = f"sync to version {version} has not ended"
        try:
            checked = [self._sync(exchange, packed) for exchange in due]
        except BaseException as error:
            self._reason = f"sync to version {version} failed: {error}"
            raise
        if self._device.type == "cuda" and packed is None:
            torch.cuda.synchronize(self._device)
        self._version, self._reason = version, ""
        return SyncReport(
            version,
            sum(exchange.bytes_moved for exchange in due),
            sum(exchange.bytes_self for exchange in due),
            sum(len(exchange.buckets) for exchange in due),
            sum(compared for compared, _ in checked),
            sum(checksum for _, checksum in checked),
        )

    def _sync(self, exchange: Exchange, packed: Packed | None) -> tuple[int, int]:
        """Write the rows of an exchange. Return (copies compared, sum of their checksums) over all ranks."""
        guard, checks = ErrorHolder(), Checks(self._group, self._wire)
        self._write(exchange, guard, checks, packed)
        guard(checks.sum, exchange.due)
        self._raise_together(guard.error)
        checks.exchange()
        differ, compared, total = guard(checks.compare) or ((), 0, 0)
        error = guard.error
        if differ:
            first = differ[0]
            error = ReshardError(
                f"{len(differ)} copies arrived changed, first {first.target} rows {first.target_offset}.."
                f"{first.target_offset + first.size - 1} from rank {first.source_rank}"
            )
        self._raise_together(error)
        totals = all_reduce_sum(torch.tensor([compared, total]), self._group)
        return int(totals[0]), int(totals[1])

    @torch.no_grad()
    def _write(self, exchange: Exchange, guard: ErrorHolder, checks: Checks, packed: Packed | None) -> None:
        """Write all rows. Collective. The buffers are freed on return, before the checksums need memory."""
        staging = packed.staging if packed is not None else guard(exchange.prepare)
        for rows in self._padding:
            rows.zero_()
        self._raise_together(guard.error)
        assert staging is not None, "a rank without it has raised"
        exchange.run(staging, guard, self._on_bucket, checks, packed)

    def _raise_together(self, error: Exception | None) -> None:
        """Raise ReshardError on all ranks if any rank has an error. Collective."""
        own = f"{type(error).__name__}: {error}" if error else None
        raise_together(own, lambda found: ReshardError(by_rank(found)), str, self._group, cause=error)

    def _agree(self, planned: str, target: Mapping[str, Tensor]) -> dict[tuple[int, str], torch.dtype]:
        """Return the types of the target tensors, {(rank, name): type}. Collective.

        Raises ReshardError if two ranks made different plans.
        """
        types = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in target.items()}
        own = _Declared(planned, types)
        said = [declared for (declared,) in gather_records([own], _Declared, self._group)]
        odd = [rank for rank, record in enumerate(said) if record.digest != said[0].digest]
        if odd:
            raise ReshardError(
                f"ranks {odd} planned a different reshard from rank 0; give all ranks the same layouts"
            )
        return {
            (rank, name): getattr(torch, dtype)
            for rank, record in enumerate(said)
            for name, dtype in record.types.items()
        }


@dataclass(frozen=True)
class _Declared:
    """What a rank sends to all other ranks before the first sync."""

    digest: str
    types: dict[str, str]  # of its target tensors


def _padding(target: Mapping[str, Tensor], spans: Spans) -> list[Tensor]:
    return [
        target[name].detach().narrow(span.dim, span.local, span.size)
        for name, tensor_spans in spans.items()
        for span in tensor_spans
        if span.hf_key == PADDING
    ]


def mismatch(
    side: str, tensors: Mapping[str, Tensor], spans: Spans, widths: Mapping[str, int], *, all_named: bool
) -> str:
    """Return how a rank's tensors differ from its layout, or "" if they match.

    all_named: every tensor must be named in the layout.
    """
    odd = sorted(set(spans) - set(tensors)) + (sorted(set(tensors) - set(spans)) if all_named else [])
    if odd:
        return f"{side} tensors and layout have different names: {odd[:4]}."
    for name, tensor_spans in spans.items():
        shape, last = tuple(tensors[name].shape), tensor_spans[-1]
        rows = last.local + last.size
        width = {widths[span.hf_key] for span in tensor_spans if span.hf_key != PADDING}
        if shape[last.dim] != rows or any(tensors[name].numel() != rows * w for w in width):
            return f"{side} {name} has shape {shape}, its layout {rows} rows of {width} along dim {last.dim}."
    return ""
