"""Counts the FLOP of a decoder's matrix products from its sizes. Recomputation and padding are not counted.

The count follows Chowdhery et al., "PaLM" (arXiv 2204.02311), appendix B, extended to the parts of layers
(weights/sharding/parts.py). It differs in two places: an average query attends to half of its sequence, and
only action tokens pass through the head.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

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
    weights = shape.layers * shape.mlp.weights()
    weights += sum(mixer.weights() for mixer in shape.mixers)
    head = 2 * shape.hidden * shape.vocab * head_tokens
    return 2 * weights * sum(lengths_N) + mixing(shape, lengths_N) + head


def mixing(shape: ModelShape, lengths_N: Sequence[int]) -> int:
    """Return the FLOP of the products in `forward` that have no weights, such as those of attention."""
    alike = Counter(shape.mixers)
    return sum(layers * mixer.products(lengths_N) for mixer, layers in alike.items())


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
