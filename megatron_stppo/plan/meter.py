"""Measurement of the peak memory and the FLOP of a computation, by running it on meta tensors.

A dispatch mode sees every operation of the real graph, including those of autograd and of recomputation. The
numbers are therefore correct for any setting, and no formula for what a layer keeps for its backward is
needed.

Substitutes stand for fused kernels of the planned device: without them torch computes norms, attention and
SwiGLU on meta tensors by separate operations, which keep more memory. megatron's dispatcher reads from the
device how many tokens each expert receives. Here every expert receives the same number; a run whose router
prefers some experts takes more memory on their ranks.
"""

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher as Dispatcher
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.nn.attention import varlen  # noqa: F401 - registers its operators
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from megatron_stppo.parallel import cpu_platform

aten = torch.ops.aten


class Meter(TorchDispatchMode):
    """Counter of FLOP and of the bytes of meta storages made inside the context. Host tensors do not count.

    Operations that read data get fixed values, because meta tensors have none: a selection chooses every row,
    which costs most; a flag is False; a number is 1.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = self.flop = 0
        self._seen: set[int] = set()

    def rest(self) -> int:
        """Reset the peak and the FLOP. Return the bytes that are alive now."""
        self.peak, self.flop = self.alive, 0
        return self.alive

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [*tensors_in(args), *tensors_in(kwargs.values())]
        answer = READS.get(func) if any(x.is_meta for x in given) else None
        if func is aten.index_add.default:  # the keys of context parallelism have their indices on the host
            args = [x.to("meta") if isinstance(x, Tensor) else x for x in args]
        out = answer(*args) if answer else func(*args, **kwargs)
        count = FLOP.get(func._overloadpacket)
        if count is not None:
            sizes = [x for x in args if not isinstance(x, torch.dtype)]  # of addmm(..., out_dtype)
            self.flop += count(*sizes, **kwargs, out_val=out)
        before = {x.untyped_storage()._cdata for x in given}
        for tensor in tensors_in((out,)):
            if tensor.is_meta:
                self._count(tensor.untyped_storage(), before)
        return out

    def _count(self, storage: torch.UntypedStorage, before: set[int]) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in before or key in self._seen:
            return
        self._seen.add(key)
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.alive -= size


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among an operator's arguments or results, including those in lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def every_row(mask: Tensor) -> Tensor:
    """Return nonzero() of a mask without values, as if all were True: int64 [numel, dim] on meta."""
    return torch.empty(mask.numel(), mask.dim(), dtype=torch.int64, device="meta")


def _grouped(rows: Tensor, weights: Tensor, ends: Tensor, *_: object) -> Tensor:
    """Return the result of grouped_mm. torch's own meta kernel refuses float32."""
    if weights.dim() == 3:
        return rows.new_empty(len(rows), weights.shape[2])
    return rows.new_empty(len(ends), len(rows), weights.shape[1])


def _arrived(*_: object) -> Any:
    """Return a completed collective of a fake group. torch has no meta kernel for the two operators below."""
    return FakeWork().boxed()


READS: dict[Any, Callable[..., Any]] = {
    aten.nonzero.default: every_row,
    aten._grouped_mm.default: _grouped,
    aten._local_scalar_dense.default: lambda x: x.dtype not in (torch.bool, torch.uint8),
    torch.ops.c10d.reduce_scatter_tensor_coalesced_.default: _arrived,
    torch.ops.c10d.allgather_into_tensor_coalesced_.default: _arrived,
}


def _causal(query: Tensor, keys: int) -> int:
    """Return the FLOP of causal attention: per query and head two products with `keys` keys, half masked."""
    return math.prod(query.shape) * keys * 2


def _varlen(query: Tensor, key: Tensor, value: Tensor, *args: Any, out_val: Any, **kwargs: Any) -> int:
    return _causal(query, args[3])


def _varlen_backward(gradient: Tensor, query: Tensor, *args: Any, out_val: Any, **kwargs: Any) -> int:
    return _causal(query, args[7]) * 5 // 2  # five matrix products, where the forward has two


def _of_groups(rows: Tensor, weights: Tensor, *args: Any, out_val: Tensor, **kwargs: Any) -> int:
    return 2 * math.prod(rows.shape) * weights.shape[-1]


FLOP: dict[Any, Callable[..., int]] = {
    **flop_registry,
    aten._grouped_mm: _of_groups,
    torch.ops.torch_attn._varlen_attn: _varlen,
    torch.ops.torch_attn._varlen_attn_backward: _varlen_backward,
}


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
