"""Substitutes for what meta tensors do not have: fused kernels of the planned device, and values to route by.

Without the kernels torch computes norms, attention and SwiGLU on meta tensors by separate operations, which
keep more memory. megatron's dispatcher reads from the device how many tokens each expert receives. Here every
expert receives the same number; a run whose router prefers some experts takes more memory on their ranks.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher as Dispatcher
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


def route_evenly(chunks: Iterable[torch.nn.Module]) -> None:
    """Make the counts of the chunks' dispatchers even. The counts are on the host, all else is on meta."""
    for dispatcher in _dispatchers(chunks):
        dispatcher.preprocess = partial(_preprocess, dispatcher, dispatcher.preprocess)  # type: ignore[method-assign]


def _preprocess(self: Dispatcher, measured: Callable[[Tensor], Tensor], routing_map: Tensor) -> Tensor:
    measured(routing_map)
    ranks, local = self.tp_size * self.ep_size, slice(None, self.num_local_experts)
    sent = even(self.num_out_tokens, self.num_experts)
    mine = sent[local]  # from each rank; the experts of other ranks may get one more or less
    if ranks > 1:
        self.input_splits = sent.reshape(self.ep_size, -1).sum(1)
        self.output_splits = mine.sum().repeat(self.ep_size)
        self.output_splits_tp = self.output_splits.sum().repeat(self.tp_size)
    if self.num_local_experts > 1:
        self.num_global_tokens_per_local_expert = mine.repeat(ranks, 1)
    return mine * ranks


def forget(chunks: Iterable[torch.nn.Module]) -> None:
    """Drop the last autograd graph that each dispatcher keeps.

    The graph is part of a reference cycle with the models, which Python's garbage collector does not find.
    """
    for dispatcher in _dispatchers(chunks):
        dispatcher.probs = None


def _dispatchers(chunks: Iterable[torch.nn.Module]) -> Iterator[Dispatcher]:
    for chunk in chunks:
        for layer in chunk.modules():
            if isinstance(layer, MoELayer):
                yield layer.token_dispatcher


def even(total: int, parts: int) -> Tensor:
    """Split `total` into equal parts: int64 [parts], on the host. Example: even(7, 3) is [3, 2, 2]."""
    return torch.tensor([total // parts + (part < total % parts) for part in range(parts)])
