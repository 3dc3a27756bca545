"""Verification of a reshard: a checksum per copy, computed at its source and at its target."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_stppo.ops.bucket_checksum import BucketChecksum
from megatron_stppo.ops.transfer import to_device
from megatron_stppo.weights.reshard.plan import RowCopy


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


class Sums(NamedTuple):
    """The checksums of one sync on one rank: int64, ordered by the rank at the other end of the copy."""

    copies: list[RowCopy]  # that must have arrived
    found: Tensor  # [len(copies)], computed in the targets
    expected: Tensor  # [len(copies)], computed in the sources; undefined until Checks.exchange
    leaving: Tensor  # [sum(to_each)], of the copies that this rank sent
    from_each: list[int]  # number of copies from each rank, of `copies`
    to_each: list[int]  # number of copies to each rank, of `leaving`

    def compare(self) -> tuple[list[RowCopy], int, int]:
        """Compare the checksums, after Checks.exchange.

        Return (copies that differ on this rank, number of copies compared, sum of the targets' checksums).
        """
        expected, found = torch.stack([self.expected, self.found]).cpu()  # the host waits once
        differ = (expected != found).nonzero().flatten().tolist()
        return [self.copies[i] for i in differ], len(self.copies), int(found.sum())


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

    def sum(self) -> Sums:
        """Return the checksums; those of the targets are computed now, after everything is written.

        Not collective. It allocates all memory that `exchange` needs.
        """
        to = [rank for ranks, _ in self._sent for rank in ranks]
        due = [summed.copies[index] for summed, chosen in self._due for index in chosen]
        source = [copy.source_rank for copy in due]
        found = self._by_rank(source, [summed.sums(chosen) for summed, chosen in self._due])
        return Sums(
            copies=sorted(due, key=lambda copy: copy.source_rank),
            found=found,
            expected=torch.empty_like(found),
            leaving=self._by_rank(to, [sums for _, sums in self._sent]),
            from_each=self._per_rank(source),
            to_each=self._per_rank(to),
        )

    def exchange(self, sums: Sums) -> None:
        """Fill sums.expected with the checksums that the sources' ranks computed. Collective."""
        dist.all_to_all_single(sums.expected, sums.leaving, sums.from_each, sums.to_each, group=self._group)

    def _choose(self, numbers: list[int], ranks: list[int]) -> list[int]:
        chosen = []
        for index, rank in enumerate(ranks):
            if self._chosen(numbers[rank]):
                chosen.append(index)
            numbers[rank] += 1
        return chosen

    def _per_rank(self, ranks: list[int]) -> list[int]:
        count = Counter(ranks)
        return [count[rank] for rank in range(self._world)]

    def _by_rank(self, ranks: list[int], sums: list[Tensor]) -> Tensor:
        """Return the sums ordered by rank; sums of the same rank keep their order."""
        order = sorted(range(len(ranks)), key=ranks.__getitem__)
        together = torch.cat([torch.empty(0, dtype=torch.int64, device=self._device), *sums])
        return together[to_device(torch.tensor(order, dtype=torch.int64, device="cpu"), self._device)]
