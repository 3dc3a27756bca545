"""Tokens per second, and MFU: model FLOP per second as a fraction of the GPUs' peak.

FLOP of a decoder's matrix products are counted from its sizes; recomputation and padding are not counted. The
count follows Chowdhery et al., "PaLM" (arXiv 2204.02311), appendix B, extended to the parts of layers
(weights/sharding/parts.py). It differs in two places: an average query attends to half of its sequence, and
only action tokens pass through the head.
"""

import functools
from collections import Counter
from collections.abc import Callable, Collection, Sequence

import torch

from megatron_stppo.base.types import Batch
from megatron_stppo.config import Config
from megatron_stppo.weights.sharding.hf_names import ModelShape, read_shape
from megatron_stppo.weights.sharding.low_rank import adapted

# Dense bfloat16 FLOP per second by the driver's name of the device. Source: NVIDIA's data sheets.
PEAK_FLOPS = {
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
}
TRAINED = 3  # forward and backward; the backward pass has two matrix products for each one of the forward
_shape_of = functools.cache(read_shape)  # once per run: the folder can be away later


def throughput(
    config: Config, shape: ModelShape, batch: Batch, seconds: Callable[[str], float], world: int
) -> dict[str, float]:
    """Return rollout/tokens_per_second and update/tokens_per_second, and mfu/* on a GPU of PEAK_FLOPS.

    `seconds`: function from phase to seconds (Metrics.seconds). `world`: number of ranks, one GPU each.
    """
    rows = {
        "rollout/tokens_per_second": len(batch.action_index_T) / seconds("rollout"),
        "update/tokens_per_second": config.update.epochs * batch.tokens / seconds("update"),
    }
    peak = PEAK_FLOPS.get(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    if peak is not None:
        for phase, flop in phase_flop(config, shape, batch).items():
            rows[f"mfu/{phase}"] = flop / (seconds(phase) * world * peak)
    return rows


def phase_flop(config: Config, shape: ModelShape, batch: Batch) -> dict[str, int]:
    """Return the model FLOP of an iteration by phase, over all ranks.

    A token counts in each trajectory that shares it. Every model that is scored computes each token once. Per
    epoch the actor trains on each token once, the critic update.critic_steps times. The forward pass for
    actor/kl_after is left out.
    """
    lengths = batch.sequence_offsets.diff().tolist()
    actions, lora = len(batch.action_index_T), (config.model.lora.rank, config.model.lora.names)
    policy, critic = forward_flop(shape, lengths, actions), forward_flop(shape, lengths) * config.needs_critic
    other = config.model.reference_path
    reference = policy if other is None else forward_flop(_shape_of(other), lengths, actions)
    with_adapters = config.scores_actor + config.needs_critic
    if config.of_reference.model.lora.path is not None:
        with_adapters += config.needs_reference
    of_adapters = adapter_flop(shape, lengths, *lora) * with_adapters
    # tokens at the heads of actor and critic
    trained = [actions, *([0] * config.update.critic_steps if config.needs_critic else [])]
    return {
        "score": policy * config.scores_actor + reference * config.needs_reference + critic + of_adapters,
        "update": config.update.epochs * sum(training_flop(shape, lengths, head, *lora) for head in trained),
    }


def forward_flop(shape: ModelShape, lengths_N: Sequence[int], head_tokens: int = 0) -> int:
    """Return the FLOP of one forward pass over sequences of these lengths.

    head_tokens: the number of tokens that the vocabulary head is applied to; 0 for a critic, whose head has
    one column.
    Example: 1 layer, hidden 4, 2 heads of size 2, 1 KV head and ffn 8 have 16 + 2 * 8 + 16 + 3 * 32 = 144
    weights. One sequence of 3 tokens takes 2 * 144 * 3 FLOP for them and 2 * 2 * 2 * 3^2 in attention: 936.
    """
    weights = shape.layers * shape.mlp.weights()
    weights += sum(mixer.weights() for mixer in shape.mixers)
    head = 2 * shape.hidden * shape.vocab * head_tokens
    return 2 * weights * sum(lengths_N) + mixing_flop(shape, lengths_N) + head


def mixing_flop(shape: ModelShape, lengths_N: Sequence[int]) -> int:
    """Return the FLOP of the products in `forward_flop` that have no weights, such as those of attention."""
    alike = Counter(shape.mixers)
    return sum(layers * mixer.products(lengths_N) for mixer, layers in alike.items())


def adapter_flop(shape: ModelShape, lengths_N: Sequence[int], rank: int, targets: Collection[str]) -> int:
    """Return the FLOP that low-rank adapters add to `forward_flop`: A x and B (A x) of every target.

    Example: rank 1 on a weight [4, 4] takes 2 * (4 + 4) FLOP per token.
    """
    return 2 * rank * sum(map(sum, adapted(shape, targets).values())) * sum(lengths_N)


def training_flop(
    shape: ModelShape, lengths_N: Sequence[int], head_tokens: int, rank: int, targets: Collection[str]
) -> int:
    """Return the FLOP of forward and backward.

    With adapters (rank above 0) the backward has no product for a gradient of the weights.
    """
    products = mixing_flop(shape, lengths_N)
    weights = forward_flop(shape, lengths_N, head_tokens) - products
    trained = products + adapter_flop(shape, lengths_N, rank, targets)
    return (TRAINED - 1 if rank else TRAINED) * weights + TRAINED * trained
