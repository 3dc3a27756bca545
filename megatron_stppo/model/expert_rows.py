"""The order of tokens by expert, and back. The outputs of a token's experts are added in float32, in order.

On a GPU megatron adds them with atomic operations in bfloat16. Then two passes over the same tokens give
different log-probs, and the ratios of the first step are not 1. Here the sums, forward and backward, read a
token's rows one after the other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from megatron.core.transformer.moe import token_dispatcher
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


def permute(
    tokens: Tensor, routing_map: Tensor, probs: Tensor, num_out_tokens: int, **_: Any
) -> tuple[Tensor, Tensor, Order]:
    """Replace megatron's function: return (rows, their probabilities, their order).

    routing_map: bool [T, E], the K experts of each token, all different. num_out_tokens: T * K.
    """
    count = num_out_tokens // len(tokens) if len(tokens) else 1
    # megatron's masked_select would wait for the GPU to learn the number of rows
    expert_TK = routing_map.byte().topk(count).indices.sort().values
    order = order_of(expert_TK)
    prob_N = probs.gather(1, expert_TK).flatten().index_select(0, order.choice_N)
    rows: Tensor = _Spread.apply(tokens, order.token_N, order.row_TK)
    return rows, prob_N, order


def unpermute(rows: Tensor, order: Order, restore_shape: torch.Size, **_: Any) -> Tensor:
    """Replace megatron's function: return the tokens, `restore_shape`."""
    tokens: Tensor = _Gather.apply(rows, order.token_N, order.row_TK)
    return tokens.view(restore_shape)


def install() -> None:
    """Let megatron's dispatchers of tokens call these functions instead of their own."""
    assert token_dispatcher.permute and token_dispatcher.unpermute, "megatron has other names"
    token_dispatcher.permute, token_dispatcher.unpermute = permute, unpermute
