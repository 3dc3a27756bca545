"""Products of two matrices of bfloat16 or float32 that are accumulated, and returned or added, in float32.

torch has them on a GPU (`out_dtype`). On a CPU the factors are copied to float32.
"""

from __future__ import annotations

import torch
from torch import Tensor


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in float32. a: [n, k]. b: [k, m]. Both are bfloat16 or both are float32."""
    if a.dtype == torch.float32:
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def add_product(sums: Tensor, a: Tensor, b: Tensor, spare: int | None = None) -> None:
    """Add a @ b to `sums`, float32 [n, m], in place. The product itself is never rounded to bfloat16.

    spare: bytes that a copy of rows of a bfloat16 `a` may take on a CPU; None: as many as all of them take.
    """
    if a.dtype == torch.float32:
        sums.addmm_(a, b)
    elif a.is_cuda:  # without a copy of the product
        torch.addmm(sums, a, b, out_dtype=torch.float32, out=sums)
    else:
        block = max(1, len(a)) if spare is None else max(64, spare // (4 * max(1, len(b))))
        right = b.float()
        for start in range(0, len(a), block):
            sums[start : start + block].addmm_(a[start : start + block].float(), right)
