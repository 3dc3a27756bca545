"""Counts the FLOP of a decoder's matrix products from its sizes. Recomputation and padding are not counted.

The count follows Chowdhery et al., "PaLM" (arXiv 2204.02311), appendix B, extended to grouped heads and
experts. It differs in two places: an average query attends to half of its sequence, and only action tokens
pass through the head.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_stppo.sharding.hf_names import ModelShape

TRAINED = 3  # forward and backward; the backward pass has two matrix products for each one of the forward


def forward(shape: ModelShape, lengths_N: Sequence[int], head_tokens: int = 0) -> int:
    """Return the FLOP of one forward pass over sequences of these lengths.

    head_tokens: the number of tokens that the vocabulary head is applied to; 0 for a critic, whose head has
    one column.
    Example: 1 layer, hidden 4, 2 heads of size 2, 1 KV head and ffn 8 have 16 + 2 * 8 + 16 + 3 * 32 = 144
    weights. One sequence of 3 tokens takes 2 * 144 * 3 FLOP for them and 2 * 2 * 2 * 3^2 in attention: 936.
    """
    width, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    mlp = 3 * shape.hidden * shape.ffn * max(1, shape.experts_per_token) + shape.hidden * shape.experts
    weights = shape.hidden * (2 * width + 2 * keys) + mlp
    attention = 2 * width * sum(length**2 for length in lengths_N)
    layer = 2 * weights * sum(lengths_N) + attention
    return shape.layers * layer + 2 * shape.hidden * shape.vocab * head_tokens
