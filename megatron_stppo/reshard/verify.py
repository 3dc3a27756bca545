"""Verification of a reshard: a checksum per copy, computed at its source and at its target."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_stppo.ops.bucket_checksum import BucketChecksum
from megatron_stppo.ops.transfer import to_device
from megatron_stppo.reshard.plan import RowCopy


class ReshardError(RuntimeError):
    """The engine's weights do not match any version of the trainer's.

    The engine must not generate with them.
    """


class Summed:
    """Copies, and the view of each on one side. Their checksums are computed in one call.

    dtypes: the types of the targets, in which the rows are summed on both sides.
    """

    def __init__(
        self, copies: Sequence[RowCopy], views: Iterable[Tensor], dtypes: Iterable[torch.dtype]
    ) -> None:
        self.copies = copies
        self._checksum = BucketChecksum(list(views), list(dtypes))

    def sums(self, chosen: list[int]) -> Tensor:
        """Return the checksums of the copies with these indices: int64 [len(chosen)]."""
        return self._checksum(None if len(chosen) == len(self.copies) else chosen)


class Checks:
    """The copies that this rank sends in one sync, and the copies that must arrive in its own tensors.

    Both ranks of a pair number the copies between them in the same way. A copy is compared if
    `chosen(number)` is True. It is summed once at its source, after the cast, and once at its target, after
    everything is written.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        world: int,
        device: torch.device,
        chosen: Callable[[int], bool],
    ) -> None:
        self._group, self._world, self._device, self._chosen = group, world, device, chosen
        self._numbers: list[list[int]] = [[0] * world for _ in range(2)]  # copies so far to, from each rank
        self._sent: list[tuple[list[int], Tensor]] = []  # target ranks, sums
        self._due: list[tuple[Summed, list[int]]] = []
        self._found: list[Tensor] = []  # the sums of _due

    def sent(self, summed: Summed) -> None:
        """Record copies that are sent now, and sum the chosen ones."""
        ranks = [copy.target_rank for copy in summed.copies]
        if chosen := self._choose(self._numbers[0], ranks):
            self._sent.append(([ranks[index] for index in chosen], summed.sums(chosen)))

    def due(self, summed: Summed) -> None:
        """Record copies that must be in their targets at the end; `sum` sums the chosen ones."""
        ranks = [copy.source_rank for copy in summed.copies]
        if chosen := self._choose(self._numbers[1], ranks):
            self._due.append((summed, chosen))

    def sum(self) -> None:
        """Sum the chosen copies in their targets, after everything is written."""
        self._found = [summed.sums(chosen) for summed, chosen in self._due]

    def exchange(self) -> tuple[list[RowCopy], int, int]:
        """Compare the checksums of sources and targets, after `sum`. Collective.

        Return (copies that differ on this rank, number of copies compared, sum of the targets' checksums).
        """
        to = [rank for ranks, _ in self._sent for rank in ranks]
        due = [summed.copies[index] for summed, chosen in self._due for index in chosen]
        leaving = self._by_rank(to, [sums for _, sums in self._sent])
        found = self._by_rank([copy.source_rank for copy in due], self._found)
        due.sort(key=lambda copy: copy.source_rank)
        expected = torch.empty(len(due), dtype=torch.int64, device=self._device)
        from_each, to_each = Counter(copy.source_rank for copy in due), Counter(to)
        dist.all_to_all_single(
            expected,
            leaving,
            [from_each[rank] for rank in range(self._world)],
            [to_each[rank] for rank in range(self._world)],
            group=self._group,
        )
        expected, found = torch.stack([expected, found]).cpu()  # the host waits once
        differ = (expected != found).nonzero().flatten().tolist()
        return [due[i] for i in differ], len(due), int(found.sum())

    def _choose(self, numbers: list[int], ranks: list[int]) -> list[int]:
        chosen = []
        for index, rank in enumerate(ranks):
            if self._chosen(numbers[rank]):
                chosen.append(index)
            numbers[rank] += 1
        return chosen

    def _by_rank(self, ranks: list[int], sums: list[Tensor]) -> Tensor:
        """Return the sums ordered by rank; sums of the same rank keep their order."""
        order = sorted(range(len(ranks)), key=ranks.__getitem__)
        together = torch.cat([torch.empty(0, dtype=torch.int64, device=self._device), *sums])
        return together[to_device(torch.tensor(order, dtype=torch.int64, device="cpu"), self._device)]
