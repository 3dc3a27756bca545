"""The reshard of a whole engine: what no update changes is copied once, the rest with every version."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch.distributed as dist
from torch import Tensor

from megatron_stppo.weights.reshard.merging import Term
from megatron_stppo.weights.reshard.resharder import Resharder, SyncReport, nothing
from megatron_stppo.weights.sharding.transfers import Transfer, Transfers


class EngineSync:
    """Writes the trainer's parameters into all of an engine's tensors, in place.

    source: this rank's parameters by name. engine: this rank's tensors of the engine by name.
    transfers: what is copied once and what with every version; equal on all ranks.
    terms, group, ranks_per_node, on_bucket: as for Resharder, and so are the exceptions.

    Construction is collective.
    Example: with adapters that the engine applies itself, sync(0) writes all weights and A and B, and sync(1)
    writes A and B.
    """

    def __init__(
        self,
        source: Mapping[str, Tensor],
        engine: Mapping[str, Tensor],
        transfers: Transfers,
        terms: Mapping[tuple[str, str], Term] | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        ranks_per_node: int = 8,
        on_bucket: Callable[[int], None] = nothing,
    ) -> None:
        rank = dist.get_rank(group)
        unplanned = transfers.targets(rank, engine)

        def resharder(transfer: Transfer, names: Iterable[str]) -> Resharder:
            return Resharder(
                source,
                {name: unplanned.pop(name) for name in [*names] if name in unplanned},
                *transfer,
                terms,
                group=group,
                ranks_per_node=ranks_per_node,
                on_bucket=on_bucket,
            )

        once = transfers.once
        self._once = resharder(once, once.targets.get(rank, ())) if once is not None else None
        # It gets all tensors that are left, and raises if its layouts do not name them.
        self._each = resharder(transfers.each, unplanned)

    def published(self) -> int:
        """Return the version of the engine's tensors.

        Raises ReshardError unless the last sync succeeded on all ranks.
        """
        if self._once is not None:
            self._once.published()
        return self._each.published()

    def forget(self) -> None:
        """Have the next sync write all tensors, because the engine has lost their content. Call it on all
        ranks."""
        for part in (self._once, self._each):
            if part is not None:
                part.poison("the engine has released its memory")

    def sync(self, version: int) -> SyncReport:
        """Write what version `version` changes, and at first everything else. Collective.

        Raises ReshardError as Resharder.sync does. It is safe to call it again.
        """
        if self._once is None or self._once.synced:
            return self._each.sync(version)
        once, each = self._once.sync(version), self._each.sync(version)
        return replace(
            each,
            bytes_moved=once.bytes_moved + each.bytes_moved,
            bytes_self=once.bytes_self + each.bytes_self,
            buckets=once.buckets + each.buckets,
            compared=once.compared + each.compared,
            checksum=once.checksum + each.checksum,
        )
