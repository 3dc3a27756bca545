"""Contexts in which meta tensors use the code paths and the fused kernels of the planned device.

Outside them torch computes norms and attention on meta tensors by separate operations, which keep more
memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


@contextlib.contextmanager
def on_gpu() -> Iterator[None]:
    # A TorchFunctionMode would not work: it is inactive while a backward recomputes a forward.
    tensor: Any = torch.Tensor
    composite = functional.rms_norm
    tensor.is_cuda = property(lambda self: self.is_meta)  # hides the property of the base class
    functional.rms_norm = _rms_norm
    try:
        yield
    finally:
        functional.rms_norm = composite
        del tensor.is_cuda


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    composite = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = _attention
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = composite


def _attention(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float, enable_gqa: bool
) -> Tensor:
    """Call the operator that torch chooses on a CPU.

    Masks, which context parallelism needs, are not planned.
    """
    assert is_causal and enable_gqa
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out: Tensor = kernel(query, key, value, 0.0, is_causal, scale=scale)[0]
    return out


class _FusedRMSNorm(torch.autograd.Function):
    """RMS norm that keeps what aten::_fused_rms_norm keeps on CUDA: input, weight and a float32 per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _rms_norm(x: Tensor, shape: Any, weight: Tensor, eps: float | None = None) -> Tensor:
    out: Tensor = _FusedRMSNorm.apply(x, weight)  # type: ignore[no-untyped-call]
    return out
