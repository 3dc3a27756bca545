"""The causal convolution of a gated delta net, over packed sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Kernel = Callable[[Tensor, Tensor], Tensor | None]


class Convolution(torch.autograd.Function):
    """y[t] = sum over n of weight[:, width - 1 - n] * x[t - n], where t - n is in the sequence of t.

    x [P, C], weight [C, 1, width] (one filter per channel), position [P]: index of each token in its
    sequence. It keeps x only; torch's operations would keep a shifted copy of x for every column of the
    weight. kernel: another function of x and weight for y, which may return None.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, position: Tensor, kernel: Kernel | None = None
    ) -> Tensor:
        ctx.save_for_backward(x, weight, position)
        given = kernel(x, weight) if kernel is not None else None
        if given is not None:
            return given
        y = torch.zeros_like(x)
        for back, column in enumerate(weight[:, 0].flip(1).unbind(1)):
            y += column * shifted(x, back, position)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, position = ctx.saved_tensors
        of_x, columns = torch.zeros_like(x), []
        for back, column in enumerate(weight[:, 0].flip(1).unbind(1)):
            columns.append((gradient * shifted(x, back, position)).sum(0, dtype=wide(x.dtype)))
            inside = gradient.masked_fill((position < back)[:, None], 0)
            of_x += column * inside.roll(-back, 0)
        return of_x, torch.stack(columns[::-1], 1)[:, None].to(weight.dtype), None, None


def shifted(x: Tensor, back: int, position: Tensor) -> Tensor:
    """Return x [P, C] of the token `back` before each token, and 0 where that is in another sequence."""
    return x.roll(back, 0).masked_fill((position < back)[:, None], 0) if back else x


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type that sums and states have: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)
