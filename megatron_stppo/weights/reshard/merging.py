"""Computes rows while they are written: W + scale * B A, so that no merged copy of a model exists, or
scale * B."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_stppo.weights.reshard.plan import RowCopy
from megatron_stppo.weights.sharding.low_rank import LowRank, Scaled

AT_ONCE = 1 << 22  # numbers of a product in memory at a time: 16 MiB
Term = LowRank | Scaled


class Move(NamedTuple):
    """One copy of rows (or columns), with the views that it reads and writes.

    Example: rows [[1, 1]] of a weight that has the term b = [[2]], a = [[3, 4]] and scale 1 write [[7, 9]].
    """

    copy: RowCopy
    source: Tensor
    target: Tensor
    term: Term | None = None  # of the whole source tensor; None: the rows are copied

    def compute(self) -> None:
        """Write the rows with their term, computed in float32 and cast once to the type of the target."""
        if isinstance(self.term, Scaled):
            self.target.copy_(self.source.float() * self.term.factor)
            return
        assert self.term is not None
        b, a, first, scale = self.term
        b, a = b.detach(), a.detach().narrow(0, first, b.shape[1])
        if self.copy.dim == 0:
            b = b.narrow(0, self.copy.source_offset, self.copy.size)
        else:
            a = a.narrow(1, self.copy.source_offset, self.copy.size)
        b, a = b.float(), a.float()
        rows, columns = self.source.shape
        step = max(1, AT_ONCE // columns)
        for start in range(0, rows, step):
            part = slice(start, start + step)
            self.target[part].copy_(torch.addmm(self.source[part].float(), b[part], a, alpha=scale))
