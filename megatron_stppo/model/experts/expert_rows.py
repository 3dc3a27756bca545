"""The order of tokens by expert, and back. The outputs of a token's experts are added in float32, in order.

On a GPU megatron adds them with atomic operations in bfloat16. Then two passes over the same tokens give
different log-probs, and the ratios of the first step are not 1. Here the sums, forward and backward, read a
token's rows one after the other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import embedding_bag


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


class _Spread(Function):
    """Tokens [T, H] -> rows [N, H]. The gradient of a token is the sum of those of its rows."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, token_N: Tensor, row_TK: Tensor) -> Tensor:
        ctx.save_for_backward(row_TK)
        return tokens.index_select(0, token_N)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (row_TK,) = ctx.saved_tensors
        return _sums(gradient, row_TK), None, None


class _Gather(Function):
    """Rows [N, H] -> tokens [T, H], the sums of their rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, token_N: Tensor, row_TK: Tensor) -> Tensor:
        ctx.save_for_backward(token_N)
        return _sums(rows, row_TK)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (token_N,) = ctx.saved_tensors
        return gradient.index_select(0, token_N), None, None


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
    rows: Tensor = _Spread.apply(tokens, order.token_N, order.row_TK)
    return rows


def gathered(rows: Tensor, order: Order) -> Tensor:
    """Return the tokens [T, H] of rows [N, H]: the sum of each token's rows."""
    tokens: Tensor = _Gather.apply(rows, order.token_N, order.row_TK)
    return tokens


def use(model: torch.nn.Module) -> None:
    """Give every layer of experts in `model` this dispatcher instead of megatron's."""
    for layer in model.modules():
        if isinstance(layer, MoELayer):
            layer.token_dispatcher = Dispatcher(
                layer.num_local_experts, layer.local_expert_indices, layer.config, get_default_pg_collection()
            )
