"""Tokens per second, and MFU: model FLOP per second as a fraction of the GPUs' peak."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from megatron_stppo.base.types import Batch
from megatron_stppo.config import Config
from megatron_stppo.model.flop import adapters, forward, training
from megatron_stppo.weights.sharding.hf_names import ModelShape, read_shape

# Dense bfloat16 FLOP per second by the driver's name of the device. Source: NVIDIA's data sheets.
PEAK_FLOPS = {
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
}


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
    policy, critic = forward(shape, lengths, actions), forward(shape, lengths) * config.needs_critic
    other = config.model.reference_path
    reference = policy if other is None else forward(_shape_of(other), lengths, actions)
    with_adapters = config.scores_actor + config.needs_critic
    if config.of_reference.model.lora.path is not None:
        with_adapters += config.needs_reference
    adapted = adapters(shape, lengths, *lora) * with_adapters
    # tokens at the heads of actor and critic
    trained = [actions, *([0] * config.update.critic_steps if config.needs_critic else [])]
    return {
        "score": policy * config.scores_actor + reference * config.needs_reference + critic + adapted,
        "update": config.update.epochs * sum(training(shape, lengths, head, *lora) for head in trained),
    }
