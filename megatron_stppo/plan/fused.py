"""The fused kernels of the planned device, on meta tensors.

Without them torch computes norms, attention and SwiGLU on meta tensors by separate operations, which keep
more memory.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from megatron_stppo.parallel import cpu_platform


def device_paths(is_cuda: bool) -> AbstractContextManager[None]:
    """Return the context in which meta tensors use the code paths and kernels of a GPU or of a CPU."""
    if not is_cuda:
        return cpu_platform.meta_as_cpu(_attention)
    return cpu_platform.meta_as_cuda(_rms_norm, _swiglu, _swiglu_back)


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


def _swiglu(x: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


def _swiglu_back(gradient: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x)
