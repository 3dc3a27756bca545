"""Computes rows while they are written: W + scale * B A, so that no merged copy of a model exists, or
scale * B."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_stppo.weights.reshard.plan import RowCopy
from megatron_stppo.weights.sharding.low_rank import LowRank, Scaled

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


@dataclass(frozen=True)
class Multiply:
    """One copy of rows (or columns) that are multiplied by a factor.

    Example: rows [[1, 2]] and factor 3 write [[3, 6]].
    """

    copy: RowCopy
    rows: Tensor
    term: Scaled
    target: Tensor

    def __call__(self) -> None:
        """Write the product, computed in float32 and cast once to the type of the target."""
        self.target.copy_(self.rows.float() * self.term.factor)


Term = LowRank | Scaled
Computed = Merge | Multiply
OF_TERM: dict[type[Term], Callable[[RowCopy, Tensor, Any, Tensor], Computed]] = {
    LowRank: Merge,
    Scaled: Multiply,
}


def computed(copy: RowCopy, source: Tensor, term: Term, target: Tensor) -> Computed:
    """Return the call that writes the rows of `source`, changed by `term`, into `target`."""
    return OF_TERM[type(term)](copy, source, term, target)
