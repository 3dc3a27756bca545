"""Forms the rows of W + scale * B A while they are written, so that no merged copy of a model exists."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_stppo.reshard.plan import RowCopy
from megatron_stppo.sharding.low_rank import LowRank

AT_ONCE = 1 << 22  # numbers of a product in memory at a time: 16 MiB


@dataclass(frozen=True)
class Merge:
    """One copy of rows (or columns) of a weight that has an adapter, and where its sum is written.

    Example: a weight [[1, 1]] with b = [[2]], a = [[3, 4]] and scale 1 writes [[7, 9]].
    """

    copy: RowCopy
    weight: Tensor  # the view of the weight that is copied
    term: LowRank  # of the whole weight
    target: Tensor

    def __call__(self) -> None:
        """Write the sum, computed in float32 and cast once to the type of the target."""
        r, copy = self.term.b.shape[1], self.copy
        b, a = self.term.b.detach(), self.term.a.detach().narrow(0, self.term.first, r)
        if copy.dim == 0:
            b = b.narrow(0, copy.source_offset, copy.size)
        else:
            a = a.narrow(1, copy.source_offset, copy.size)
        b, a = b.float(), a.float()
        rows, columns = self.weight.shape
        step = max(1, AT_ONCE // columns)
        for first in range(0, rows, step):
            part = slice(first, first + step)
            total = torch.addmm(self.weight[part].float(), b[part], a, alpha=self.term.scale)
            self.target[part].copy_(total)
