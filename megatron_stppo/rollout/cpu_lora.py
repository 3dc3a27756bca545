"""vLLM's LoRA on a CPU, as two products of matrices per layer.

vLLM's own functions copy A and B once per token, because each token could have another adapter: 5 GB for a
step of 8,192 tokens, 4,864 rows and rank 32. Here all tokens have the same adapter. This module replaces one
method of vLLM; it is tested with the pinned version. A x and B A x are rounded to the type of x, as in
model/adapters.py.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU


def one_adapter() -> None:
    """Replace the method for all engines of this process. It may be called more than once."""
    setattr(PunicaWrapperCPU, "add_lora_linear", _add)  # noqa: B010


def _add(
    wrapper: PunicaWrapperCPU,
    y: Tensor,
    x: Tensor,
    a: tuple[Tensor, ...],
    b: tuple[Tensor, ...],
    scale: float,
    slices: tuple[int, ...],
    **kwargs: Any,
) -> None:
    """Add scale * B A x to y [T, sum(slices)], for each of the layers that are joined.

    x [T, in]; a [1, 1, rank, in] and b [1, 1, out, rank] of each layer.
    """
    if wrapper.no_lora:
        return
    for part, one_a, one_b in zip(y.split(slices, dim=-1), a, b, strict=True):
        part += (x @ one_a[0, 0].t()) @ one_b[0, 0].t() * scale
