"""FLOP that a decoder's matrix products need, from its sizes; what is recomputed or padded does not count.

Chowdhery et al., "PaLM" (arXiv 2204.02311), appendix B, for grouped heads and experts. We differ in two
places: an average query attends to half of its sequence, and only action tokens pass the head.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_stppo.sharding.hf_names import ModelShape

TRAINED = 3  # a backward pass has two products for each of the forward's


def forward(shape: ModelShape, lengths_N: Sequence[int], head_tokens: int = 0) -> int:
    """FLOP of one forward pass over sequences of these lengths, `head_tokens` of whose tokens meet the
    vocabulary (0: a critic, whose head is one column).

    Example: 1 layer, hidden 4, 2 heads of 2, 1 of keys and values, ffn 8: 16 + 2 * 8 + 16 + 3 * 32 = 144
    weights; one sequence of 3 tokens takes 2 * 144 * 3 for them and 2 * 2 * 2 * 3^2 in attention, 936.
    """
    width, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    mlp = 3 * shape.hidden * shape.ffn * max(1, shape.experts_per_token) + shape.hidden * shape.experts
    weights = shape.hidden * (2 * width + 2 * keys) + mlp
    attention = 2 * width * sum(length**2 for length in lengths_N)
    layer = 2 * weights * sum(lengths_N) + attention
    return shape.layers * layer + 2 * shape.hidden * shape.vocab * head_tokens
