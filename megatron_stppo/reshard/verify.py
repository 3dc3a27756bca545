"""Did every row arrive? A checksum per copy, on both sides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_stppo.ops.bucket_checksum import BucketChecksum
from megatron_stppo.reshard.plan import RowCopy


class ReshardError(RuntimeError):
    """The engine's weights are not a version of the trainer's; nothing may be generated with them."""


class Summed:
    """Copies and the tensor of each on one side, whose checksums are found in one call.

    dtypes: the targets' types, in which the rows are summed on both sides.
    """

    def __init__(
        self, copies: Sequence[RowCopy], views: Iterable[Tensor], dtypes: Iterable[torch.dtype]
    ) -> None:
        self.copies = copies
        self._checksum = BucketChecksum(list(views), list(dtypes))

    def sums(self, chosen: list[int]) -> Tensor:
        """int64 [chosen], of the copies with these numbers."""
        return self._checksum(None if len(chosen) == len(self.copies) else chosen)


class Checks:
    """The copies of one sync that this rank sent, and those it must find in its own tensors.

    Both ends number the copies between a pair of ranks alike; `chosen(number)` says which are summed. A copy
    is summed once at its source, as it is after the cast, and once where it ended up, after everything is
    written.
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
        """These rows leave for their targets now."""
        ranks = [copy.target_rank for copy in summed.copies]
        if chosen := self._choose(self._numbers[0], ranks):
            self._sent.append(([ranks[index] for index in chosen], summed.sums(chosen)))

    def due(self, summed: Summed) -> None:
        """These rows are to be found in their targets at the end."""
        ranks = [copy.source_rank for copy in summed.copies]
        if chosen := self._choose(self._numbers[1], ranks):
            self._due.append((summed, chosen))

    def exchange(self) -> tuple[list[RowCopy], int, int]:
        """-> (copies that differ on this rank, copies compared, sum of all sums found). Collective."""
        to = [rank for ranks, _ in self._sent for rank in ranks]
        due = [summed.copies[index] for summed, chosen in self._due for index in chosen]
        leaving = self._by_rank(to, [sums for _, sums in self._sent])
        found = self._by_rank(
            [copy.source_rank for copy in due], [summed.sums(chosen) for summed, chosen in self._due]
        )
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
        """The sums in the order of their ranks; of one rank, in the order given."""
        order = sorted(range(len(ranks)), key=ranks.__getitem__)
        together = torch.cat([torch.empty(0, dtype=torch.int64, device=self._device), *sums])
        return together[torch.tensor(order, dtype=torch.int64, device=self._device)]
