"""Layers of experts: the order of tokens by expert, and one product of matrices for all experts of a rank.

The outputs of a token's experts are added in float32, in order. On a GPU megatron adds them with atomic
operations in bfloat16. Then two passes over the same tokens give different log-probs, and the ratios of the
first step are not 1. Here the sums, forward and backward, read a token's rows one after the other.

An expert gets few tokens, so that most of the time of separate products is the start of kernels: on an H100
two layers of Qwen3-30B-A3B reached 3 % of the rate of large products (docs/gpu.md). torch's fast kernel
needs bfloat16 and a GPU of compute capability 9.0 or 10.0. Elsewhere torch computes one product after the
other, and on other GPUs the host waits for each call.

The kernel reads the weights of all experts as one tensor [E, O, I]. They lie so in memory, and so do their
main gradients; a copy would move 2.4 GB per layer of Qwen3-30B-A3B, in the forward and in the backward.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import embedding_bag, grouped_mm

from megatron_stppo.ops.extension import to_device
from megatron_stppo.ops.products import add_product

LINEAR = ("linear_fc2", "linear_fc1")


class Order(NamedTuple):
    """Where the N = T * K rows of T tokens with K experts each come from, and go to."""

    token_N: Tensor  # int64 [N], the token of each row; rows are sorted by expert, then by token
    row_TK: Tensor  # int64 [T, K], the rows of each token, by expert
    choice_N: Tensor  # int64 [N], the choice of each row: t * K + k for expert k of token t


def order_of(expert_TK: Tensor) -> Order:
    """Return the order of the rows of tokens whose experts are `expert_TK`, int64 [T, K] and ascending."""
    tokens, count = expert_TK.shape
    choice_N = expert_TK.flatten().argsort(stable=True)
    row_N = torch.empty_like(choice_N).scatter_(
        0, choice_N, torch.arange(len(choice_N), device=choice_N.device)
    )
    return Order(choice_N // count, row_N.view(tokens, count), choice_N)


class _Moved(Function):
    """Tokens [T, H] -> rows [N, H], copies of them; or rows -> tokens, the sums of their rows. The gradients
    move the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token_N: Tensor, row_TK: Tensor, to_rows: bool) -> Tensor:
        ctx.save_for_backward(token_N, row_TK)
        ctx.to_rows = to_rows
        return x.index_select(0, token_N) if to_rows else _sums(x, row_TK)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        token_N, row_TK = ctx.saved_tensors
        moved = _sums(gradient, row_TK) if ctx.to_rows else gradient.index_select(0, token_N)
        return moved, None, None, None


def _sums(rows: Tensor, row_TK: Tensor) -> Tensor:
    """Return [T, H]: the sum of each token's rows, computed in float32 and rounded once."""
    return embedding_bag(row_TK, rows.contiguous(), mode="sum")


class Dispatcher(MoEAlltoAllTokenDispatcher):
    """megatron's dispatcher with this order. Shared experts, padding and capacities are not supported."""

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the rows [N, H] and their probabilities [N]. routing_map: bool [T, E], K True per token."""
        self.hidden_shape, self.probs, self.routing_map = hidden_states.shape, probs, routing_map
        tokens = hidden_states.view(-1, self.hidden_shape[-1])
        counts = self.preprocess(routing_map)
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_1", counts)
        # megatron's masked_select would wait for the GPU to learn the number of rows
        expert_TK = routing_map.byte().topk(self.config.moe_router_topk).indices.sort().values
        self.order = order_of(expert_TK)
        return spread(tokens, self.order), of_rows(probs.gather(1, expert_TK), self.order)

    def combine_postprocess(self, rows: Tensor) -> Tensor:
        """Return the sums of each token's rows, in the shape of `hidden_states`."""
        return gathered(rows, self.order).view(self.hidden_shape)


def of_rows(value_TK: Tensor, order: Order) -> Tensor:
    """Return [N]: the values of the tokens' experts in the order of the rows."""
    return value_TK.flatten().index_select(0, order.choice_N)


def spread(tokens: Tensor, order: Order) -> Tensor:
    """Return the rows [N, H] of tokens [T, H]: a copy for each expert of a token."""
    rows: Tensor = _Moved.apply(tokens, order.token_N, order.row_TK, True)
    return rows


def gathered(rows: Tensor, order: Order) -> Tensor:
    """Return the tokens [T, H] of rows [N, H]: the sum of each token's rows."""
    tokens: Tensor = _Moved.apply(rows, order.token_N, order.row_TK, False)
    return tokens


def use_dispatchers(model: torch.nn.Module) -> None:
    """Give every layer of experts in `model` this dispatcher instead of megatron's."""
    for layer in model.modules():
        if isinstance(layer, MoELayer):
            layer.token_dispatcher = Dispatcher(
                layer.num_local_experts, layer.local_expert_indices, layer.config, get_default_pg_collection()
            )


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
        modules = [
            (pair[0].rpartition(".")[2], pair)
            for pair in super().named_modules(memo, prefix, remove_duplicate)
        ]
        yield from (pair for kind, pair in modules if kind not in LINEAR)
        for layer in LINEAR:
            yield from reversed([pair for kind, pair in modules if kind == layer])


def join_weights(model: torch.nn.Module) -> None:
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
    joined = whole(weights)
    return torch.stack(list(weights)) if joined is None else joined


def _add(mains: list[Tensor], of_weights: Tensor) -> None:
    """Add the gradients [E, O, I] to the main gradients in one call."""
    main = whole(mains)
    if main is None:
        torch._foreach_add_(mains, list(of_weights.unbind()))
    else:
        main.add_(of_weights)
