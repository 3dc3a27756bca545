"""The products of a chunk's gradient with hidden states and weight, and the rows that have a gradient.

The gradient of the logits is written over the logits, and all further work stays in this memory.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_stppo.ops.products import add_product
from megatron_stppo.ops.shard import rows_of


class Gradient:
    """Accumulator of dX, and of dW in float32, over chunks of at most `longest` rows.

    of_weight: float32 in the weight's shape, to which dW is added; None for a frozen weight, which gets none.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, longest: int, of_weight: Tensor | None) -> None:
        self._hidden, self._weight = hidden, weight
        self._spare = longest * len(weight) * weight.itemsize // 10  # bytes: a tenth of a chunk of logits
        self.of_hidden, self.of_weight = torch.zeros_like(hidden), of_weight

    def add(self, of_logits: Tensor, rows: range | Tensor) -> None:
        """Add the contribution of these rows. of_logits: [rows, V_local], the gradient of their logits."""
        if not len(of_logits):
            return
        if of_logits.dtype != self._weight.dtype:
            of_logits = _rounded(of_logits, self._weight.dtype)
        hidden = rows_of(self._hidden, rows)
        if isinstance(rows, range):
            torch.mm(of_logits, self._weight, out=self.of_hidden[rows.start : rows.stop])
        else:
            self.of_hidden[rows] = of_logits @ self._weight
        if self.of_weight is not None:
            # on a CPU a piece of the bfloat16 gradient takes a tenth of a chunk in float32
            add_product(self.of_weight, of_logits.t(), hidden, self._spare)


def kept(logits: Tensor, rows: Tensor) -> Tensor:
    """Return logits[rows], moved to the front of the same memory. `rows` must be ascending.

    Rows are moved in blocks of a sixteenth of the logits, so the temporary copies are small.
    """
    step = max(1, len(logits) // 16)
    for start in range(0, len(rows), step):  # row i comes from a row >= i, not yet overwritten
        chosen = rows[start : start + step]
        logits[start : start + len(chosen)] = logits[chosen]
    return logits[: len(rows)]


def _rounded(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a float32 gradient [rows, V_local] in bfloat16, written to the front of its own memory.

    Rows are rounded in blocks of a sixteenth. Only the first block overlaps its own target, so only this one
    needs a temporary copy.
    """
    rows, columns = gradient.shape
    out = gradient.view(dtype).flatten()[: rows * columns].view(rows, columns)
    step = max(1, rows // 16)
    for start in range(0, rows, step):  # the rounded rows take half the bytes of the rows before them
        block = gradient[start : start + step]
        out[start : start + step] = block.to(dtype) if start == 0 else block
    return out


def live_rows(cotangents: Sequence[Tensor | None]) -> Tensor | None:
    """Return the rows with a nonzero cotangent, or None if these are 90% of the rows or more.

    None is also returned if all cotangents are None, and on a GPU, where the host would wait for the number
    of rows in every chunk.
    """
    given = [x for x in cotangents if x is not None]
    if not given or given[0].is_cuda:
        return None
    live = torch.nonzero(torch.stack([x != 0 for x in given]).any(0)).squeeze(1)
    return live if len(live) < 0.9 * len(given[0]) else None
