"""Counts the FLOP of a decoder's matrix products from its sizes. Recomputation and padding are not counted.

The count follows Chowdhery et al., "PaLM" (arXiv 2204.02311), appendix B, extended to grouped heads and
experts. It differs in two places: an average query attends to half of its sequence, and only action tokens
pass through the head. Of a gated delta net it counts the rule token by token (delta_net/rule.py).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from megatron_stppo.weights.sharding.delta_net import PARTS
from megatron_stppo.weights.sharding.hf_names import ModelShape
from megatron_stppo.weights.sharding.low_rank import adapted

TRAINED = 3  # forward and backward; the backward pass has two matrix products for each one of the forward


def forward(shape: ModelShape, lengths_N: Sequence[int], head_tokens: int = 0) -> int:
    """Return the FLOP of one forward pass over sequences of these lengths.

    head_tokens: the number of tokens that the vocabulary head is applied to; 0 for a critic, whose head has
    one column.
    Example: 1 layer, hidden 4, 2 heads of size 2, 1 KV head and ffn 8 have 16 + 2 * 8 + 16 + 3 * 32 = 144
    weights. One sequence of 3 tokens takes 2 * 144 * 3 FLOP for them and 2 * 2 * 2 * 3^2 in attention: 936.
    """
    width, keys, net = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.delta_net
    mlp = 3 * shape.hidden * shape.ffn * max(1, shape.experts_per_token) + shape.hidden * shape.experts
    mlp += shape.hidden * (3 * shape.shared_ffn + (shape.shared_ffn > 0))
    weights = shape.layers * mlp
    weights += shape.attention_layers * shape.hidden * (shape.query_rows + width + 2 * keys)
    if net is not None:
        weights += shape.recurrent_layers * shape.hidden * (net.count(PARTS) + net.count("v"))
    head = 2 * shape.hidden * shape.vocab * head_tokens
    return 2 * weights * sum(lengths_N) + mixing(shape, lengths_N) + head


def mixing(shape: ModelShape, lengths_N: Sequence[int]) -> int:
    """Return the FLOP of the products in `forward` that have no weights: those of attention, and of the
    states of gated delta nets.

    A token has three products with the state of a head: k^T S, the change of S, and q^T S.
    Example: a layer with 2 value heads and states [3, 5] takes 2 * 3 * 2 * 3 * 5 = 180 FLOP per token.
    """
    net = shape.delta_net
    of_states = 0 if net is None else 6 * net.value_heads * net.key_dim * net.value_dim
    return attention(shape, lengths_N) + shape.recurrent_layers * of_states * sum(lengths_N)


def attention(shape: ModelShape, lengths_N: Sequence[int]) -> int:
    """Return the FLOP of the products of queries, keys and values in `forward`, which have no weights.

    A query of a layer with a window of w tokens sees at most w: L^2 - (L - w)^2 takes the place of L^2.
    """
    within = sum(shape.window_of(n) > 0 for n in range(shape.layers))
    squares = shape.attention_layers * sum(length**2 for length in lengths_N)
    squares -= within * sum(max(0, length - shape.window) ** 2 for length in lengths_N)
    return 2 * shape.heads * shape.head_dim * squares


def adapters(shape: ModelShape, lengths_N: Sequence[int], rank: int, targets: Collection[str]) -> int:
    """Return the FLOP that low-rank adapters add to `forward`: A x and B (A x) of every target.

    Example: rank 1 on a weight [4, 4] takes 2 * (4 + 4) FLOP per token.
    """
    return 2 * rank * sum(map(sum, adapted(shape, targets).values())) * sum(lengths_N)


def training(
    shape: ModelShape, lengths_N: Sequence[int], head_tokens: int, rank: int, targets: Collection[str]
) -> int:
    """Return the FLOP of forward and backward.

    With adapters (rank above 0) the backward has no product for a gradient of the weights.
    """
    products = mixing(shape, lengths_N)
    weights = forward(shape, lengths_N, head_tokens) - products
    trained = products + adapters(shape, lengths_N, rank, targets)
    return (TRAINED - 1 if rank else TRAINED) * weights + TRAINED * trained
