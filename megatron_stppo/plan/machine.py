"""Speeds of engines and trainers on GPUs, from FLOP, bytes and the GPU's peak rates.

The rates that are reached are assumptions (assumptions.py). Nothing here was measured.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron_stppo.config import Config
from megatron_stppo.model.flop import forward
from megatron_stppo.plan.bounds import microbatch_flop
from megatron_stppo.plan.dry_run import TrainingUse
from megatron_stppo.plan.engine import EngineUse
from megatron_stppo.plan.exchange import exchange, layers_to_plan
from megatron_stppo.plan.hardware import Gpu
from megatron_stppo.plan.simulation.speeds import EngineSpeed, TrainerSpeed
from megatron_stppo.sharding.hf_names import ModelShape
from megatron_stppo.sharding.spans import serving_spans
from megatron_stppo.sharding.transfers import served_adapters, transfers


def engine_speed(
    config: Config, shape: ModelShape, engine: EngineUse, tokens: float, gpu: Gpu, given: Mapping[str, float]
) -> EngineSpeed:
    """Return the speed of an engine on rollout.engine_tensor GPUs.

    A step reads all weights, and the keys and values of all running sequences. Every token takes a forward
    pass. The three times are added: a lower bound would take the largest of them. tokens: mean tokens of an
    episode, of which half are the context of an average token.
    """
    half = max(1, round(tokens / 2))
    rate = given["engine_share"] * gpu.flops * config.engine_tensor
    bandwidth = given["memory_share"] * gpu.memory_rate
    # a key that a token attends to costs little FLOP; half an episode has the mean number of them
    trunk = forward(shape, [2 * half]) / (2 * half)
    head = 2 * shape.hidden * shape.vocab
    return EngineSpeed(
        step=given["step_seconds"] + engine.weights / bandwidth,
        sequence=(trunk + head) / rate,
        prefill=trunk / rate,
        context=engine.cache_per_token / bandwidth,
        most_sequences=max(1, min(config.rollout.max_sequences, int(engine.cached_tokens / tokens))),
    )


def trainer_speed(use: TrainingUse, tokens: float, gpu: Gpu, given: Mapping[str, float]) -> TrainerSpeed:
    """Return the speed of score and update on the GPUs of `use`.

    The FLOP per token are those of episodes of the greatest length. tokens: mean tokens of an episode, which
    give the number of micro-batches and so the bubble of the pipeline.
    """
    config, layout = use.config, use.layout
    played = config.rollout.tasks_per_iteration * config.rollout.samples_per_task
    own = 1 / (layout.data * layout.context)  # a rank's share of the tokens
    microbatches = max(1.0, played * tokens * own / config.update.minibatches / use.microbatch_tokens)
    bubble = 1 + (layout.pipeline - 1) / (layout.virtual * microbatches)
    score, update = microbatch_flop(config, use.stages)
    flop = (score + update * config.update.epochs) / use.microbatch_tokens  # of a rank, for its tokens
    return TrainerSpeed(0.0, flop * own * bubble / (given["training_share"] * gpu.flops))


def transfer_seconds(
    use: TrainingUse, shape: ModelShape, tensor: int, gpu: Gpu, given: Mapping[str, float]
) -> float:
    """Return the seconds to send an update from the trainer to one replica of `tensor` other GPUs."""
    first = use.layout.world
    replica = {first + rank: serving_spans(shape, tensor, rank) for rank in range(tensor)}
    alike = layers_to_plan(shape, use.layout)
    update = transfers(shape, use.spans, replica, served_adapters(use.config.model.lora, shape)).each
    moves = exchange(*update, alike, use.dtype.itemsize, gpu)
    return moves.seconds / given["network_share"]
