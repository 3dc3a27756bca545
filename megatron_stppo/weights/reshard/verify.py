"""Verification of a reshard: a checksum per copy, computed at its source and at its target."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_stppo.ops.extension import to_device
from megatron_stppo.weights.reshard.plan import RowCopy
from megatron_stppo.weights.reshard.staging import Summed


class ReshardError(RuntimeError):
    """The engine's weights do not match any version of the trainer's.

    The engine must not generate with them.
    """


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
