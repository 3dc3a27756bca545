"""megatron's local experts with one product of matrices for all experts of a rank, instead of one for each.

An expert gets few tokens, so that most of the time of separate products is the start of kernels: on an H100
two layers of Qwen3-30B-A3B reached 3 % of the rate of large products (docs/gpu.md). torch's fast kernel
needs bfloat16 and a GPU of compute capability 9.0 or 10.0. Elsewhere torch computes one product after the
other, and on other GPUs the host waits for each call.

The kernel reads the weights of all experts as one tensor [E, O, I]. They lie so in memory, and so do their
main gradients; a copy would move 2.4 GB per layer of Qwen3-30B-A3B, in the forward and in the backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import grouped_mm

from megatron_stppo.ops.products import add_product
from megatron_stppo.ops.transfer import to_device

LINEAR = ("linear_fc2", "linear_fc1")


class GroupedExperts(SequentialMLP):
    """The parameters are those of SequentialMLP, so checkpoints and the reshard do not change."""

    def forward(
        self, rows_NH: Tensor, tokens_per_expert: Tensor, prob_N: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return the experts' outputs [N, H] times the probabilities; there is no bias.

        rows_NH: sorted by expert. tokens_per_expert: int64 [E], on the host.
        """
        if self.num_local_experts == 1 or not len(rows_NH):
            return super().forward(rows_NH, tokens_per_expert, prob_N)
        end_E = to_device(tokens_per_expert.cumsum(0).int(), rows_NH.device)
        counts = tokens_per_expert.tolist() if self.config.gradient_accumulation_fusion else None
        down, up = (self.weights(name) for name in LINEAR)
        gate, linear = products(rows_NH, end_E, up, counts).chunk(2, dim=-1)
        inner = self.config.activation_func(gate) * linear * prob_N[:, None]
        return products(inner.to(rows_NH.dtype), end_E, down, counts), None

    def weights(self, name: str) -> list[Tensor]:
        """Return the weights [O, I] of a layer in LINEAR of all experts, in order."""
        return [getattr(expert, name).weight for expert in self.local_experts]

    def named_modules(
        self, memo: set | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Any]]:
        """Yield torch's modules in another order: at the end LINEAR of all experts, the last expert first.

        megatron's buffers hold the parameters in the reverse order, so that those of all experts are next to
        each other.
        """
        found = list(super().named_modules(memo, prefix, remove_duplicate))
        kinds = [name.rpartition(".")[2] for name, _ in found]
        yield from (pair for pair, kind in zip(found, kinds, strict=True) if kind not in LINEAR)
        for one in LINEAR:
            yield from reversed([pair for pair, kind in zip(found, kinds, strict=True) if kind == one])


def join(model: torch.nn.Module) -> None:
    """Move the weights of every layer of experts in `model` into one storage per layer in LINEAR.

    megatron's distributed optimizer moves those that are trained again, into its buffer.
    """
    for layer in model.modules():
        if isinstance(layer, GroupedExperts):
            for weights in map(layer.weights, LINEAR):
                if len(weights) > 1 and whole(weights) is None:
                    joined = torch.stack([weight.detach() for weight in weights])
                    for weight, part in zip(weights, joined, strict=True):
                        weight.data = part


def whole(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return [E, *shape], a view of E tensors that lie in one storage at equal distances, or None if they do
    not. It has no gradient."""
    first = tensors[0]
    places = [
        x.data_ptr() or x.storage_offset() * x.itemsize for x in tensors
    ]  # a meta tensor has no address
    (step, *other) = {b - a for a, b in pairwise(places)}
    if other or step < first.nbytes or step % first.itemsize:
        return None
    if any(x.shape != first.shape or x.dtype != first.dtype or not x.is_contiguous() for x in tensors):
        return None
    end = first.storage_offset() * first.itemsize + step * (len(tensors) - 1) + first.nbytes
    if end > first.untyped_storage().nbytes():  # other storages that happen to follow
        return None
    size, strides = (len(tensors), *first.shape), (step // first.itemsize, *first.stride())
    return first.detach().as_strided(size, strides)


def products(
    rows_NI: Tensor, end_E: Tensor, weights: Sequence[Tensor], counts: Sequence[int] | None = None
) -> Tensor:
    """Return [N, O]: each row times the transpose of its expert's weight [O, I].

    end_E: int32 [E], where the rows of each expert end. I and O numbers must take a multiple of 16 bytes.
    The gradients of weights with a main_grad (megatron's float32 buffer) are added there, and autograd gets
    none. counts: the rows of each expert; each expert's gradient is then a product of its own, which is added
    without being rounded. None: one product for all experts, in the type of the rows.
    """
    result: Tensor = _Products.apply(rows_NI, end_E, counts, *weights)
    return result


class _Products(Function):
    @staticmethod
    def forward(
        ctx: Any, rows_NI: Tensor, end_E: Tensor, counts: Sequence[int] | None, *weights: Tensor
    ) -> Tensor:
        trained = any(ctx.needs_input_grad[3:])
        ctx.save_for_backward(rows_NI if trained else None, end_E, *weights)
        ctx.counts = counts
        return grouped_mm(rows_NI, _stacked(weights).transpose(1, 2), offs=end_E)

    @staticmethod
    def backward(ctx: Any, gradient_NO: Tensor) -> tuple[Tensor | None, ...]:
        rows_NI, end_E, *weights = ctx.saved_tensors
        gradient_NO = gradient_NO.contiguous()
        of_rows = grouped_mm(gradient_NO, _stacked(weights), offs=end_E)
        of_weights: Sequence[Tensor | None] = (None,) * len(weights)
        if rows_NI is not None:
            mains = [weight.main_grad for weight in weights if hasattr(weight, "main_grad")]
            if len(mains) < len(weights):
                of_weights = grouped_mm(gradient_NO.t(), rows_NI, offs=end_E).unbind()
            elif ctx.counts is None:
                _add(mains, grouped_mm(gradient_NO.t(), rows_NI, offs=end_E))
            else:
                for main, (a, b) in zip(mains, pairwise(accumulate(ctx.counts, initial=0)), strict=True):
                    if a < b:
                        add_product(main, gradient_NO[a:b].t(), rows_NI[a:b])
        return of_rows, None, None, *of_weights


def _stacked(weights: Sequence[Tensor]) -> Tensor:
    """Return [E, O, I]: a view, or a copy if the weights are not in one storage."""
    found = whole(weights)
    return torch.stack(list(weights)) if found is None else found


def _add(mains: list[Tensor], of_weights: Tensor) -> None:
    """Add the gradients [E, O, I] to the main gradients in one call."""
    main = whole(mains)
    if main is None:
        torch._foreach_add_(mains, list(of_weights.unbind()))
    else:
        main.add_(of_weights)
