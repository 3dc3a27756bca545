"""Times of an iteration on GPUs, from FLOP, bytes and the GPU's peak rates. Nothing here was measured.

Bounds divide by the peak rates, and every trajectory has the greatest length that is allowed: a real run
takes longer. Speeds are those of the simulation; the shares of the peak rates are assumed (assumptions.py).
Where trajectories share prefixes, score and update take the share of the time that the computed tokens are of
all tokens. The head, which computes the action tokens of every trajectory, in fact takes more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_stppo.config import Config
from megatron_stppo.observe.throughput import forward_flop
from megatron_stppo.plan.assumptions import Gpu
from megatron_stppo.plan.exchange import exchange, layers_to_plan
from megatron_stppo.plan.simulation.engine import EngineSpeed, TrainerSpeed
from megatron_stppo.plan.usage import EngineUse, StageUse, TrainingUse
from megatron_stppo.weights.sharding.hf_names import ModelShape
from megatron_stppo.weights.sharding.low_rank import served_adapters, transfer
from megatron_stppo.weights.sharding.spans import serving_spans


@dataclass(frozen=True)
class Bounds:
    """Lower bounds in seconds, and the work of an iteration."""

    rollout: float
    score: float
    update: float
    reshard: float
    tokens: int  # of all trajectories
    tokens_per_second: float  # at most


def bounds(
    use: TrainingUse, shape: ModelShape, engine: EngineUse, reshard_seconds: float, gpu: Gpu
) -> Bounds:
    """Return the bounds of a run in which all GPUs train and serve."""
    config, layout, work = use.config, use.layout, use.work
    distinct = use.sharing.distinct
    # of a rank, in micro-batches
    share = work.tokens * distinct / use.microbatch_tokens * config.update.minibatches
    bubble = 1 + (layout.pipeline - 1) / (layout.virtual * max(1.0, work.microbatches * distinct))
    scored, updated = _microbatch_flop(config, use.stages)
    score, update = scored * share, updated * share * config.update.epochs
    seconds = (_rollout(use, shape, engine, gpu), score * bubble / gpu.flops, update * bubble / gpu.flops)
    tokens = config.rollout.episodes * work.longest
    return Bounds(*seconds, reshard_seconds, tokens, tokens / (sum(seconds) + reshard_seconds))


def _microbatch_flop(config: Config, stages: Sequence[StageUse]) -> tuple[int, int]:
    """Return the FLOP of a micro-batch on one GPU of the stage with most of them: (score, update)."""
    passes = {
        "actor": 2 if config.algorithm.correction == "gradient" else 1,
        "critic": config.update.critic_steps,
    }
    scored = max(sum(stage.models[role].score_flop for role in stage.scored) for stage in stages)
    updated = max(
        sum(use.update_flop * passes.get(role, 1) for role, use in stage.models.items()) for stage in stages
    )
    return scored, updated


def _rollout(use: TrainingUse, shape: ModelShape, engine: EngineUse, gpu: Gpu) -> float:
    """Return the seconds of the rollout: the larger of the time to read memory and the time to compute.

    Every step reads all weights. Every token reads the keys and values before it, on average those of half a
    trajectory, and reads and writes the states of its sequence.
    """
    config, layout, work = use.config, use.layout, use.work
    played = config.rollout.episodes / (layout.world // config.engine_tensor)
    room = max(1, engine.cached_tokens // work.longest)  # whole trajectories in the cache
    together = min(config.rollout.max_sequences, played, room)
    steps = played / together * work.action_tokens
    keys = played * work.action_tokens * work.longest / 2 * engine.cache_per_token
    states = 2 * played * work.action_tokens * engine.state
    read = (steps * engine.weights + keys + states) / gpu.memory_rate
    flop = played * forward_flop(shape, [work.longest], work.action_tokens)
    return max(read, flop / config.engine_tensor / gpu.flops)


def engine_speed(
    config: Config,
    shape: ModelShape,
    engine: EngineUse,
    tokens: float,
    gpu: Gpu,
    assumed: Mapping[str, float],
) -> EngineSpeed:
    """Return the speed of an engine on rollout.engine_tensor GPUs.

    A step reads all weights, and the keys and values of all running sequences. Every token takes a forward
    pass. The three times are added: a lower bound would take the largest of them. tokens: mean tokens of an
    episode, of which half are the context of an average token.
    """
    half = max(1, round(tokens / 2))
    rate = assumed["engine_share"] * gpu.flops * config.engine_tensor
    bandwidth = assumed["memory_share"] * gpu.memory_rate
    # a key that a token attends to costs little FLOP; half an episode has the mean number of them
    trunk = forward_flop(shape, [2 * half]) / (2 * half)
    head = 2 * shape.hidden * shape.vocab
    return EngineSpeed(
        step=assumed["step_seconds"] + engine.weights / bandwidth,
        sequence=(trunk + head) / rate + 2 * engine.state / bandwidth,
        prefill=trunk / rate,
        context=engine.cache_per_token / bandwidth,
        most_sequences=max(1, min(config.rollout.max_sequences, int(engine.cached_tokens / tokens))),
    )


def trainer_speed(use: TrainingUse, tokens: float, gpu: Gpu, assumed: Mapping[str, float]) -> TrainerSpeed:
    """Return the speed of score and update on the GPUs of `use`.

    The FLOP per token are those of episodes of the greatest length. tokens: mean tokens of an episode, which
    give the number of micro-batches and so the bubble of the pipeline.
    """
    config, layout = use.config, use.layout
    own = use.sharing.distinct / (layout.data * layout.context)  # computed tokens of a rank / all tokens
    mine = config.rollout.episodes * tokens * own / config.update.minibatches
    bubble = 1 + (layout.pipeline - 1) / (layout.virtual * max(1.0, mine / use.microbatch_tokens))
    score, update = _microbatch_flop(config, use.stages)
    flop = (score + update * config.update.epochs) / use.microbatch_tokens  # of a rank, for its tokens
    return TrainerSpeed(0.0, flop * own * bubble / (assumed["training_share"] * gpu.flops))


def sending_seconds(
    use: TrainingUse,
    shape: ModelShape,
    tensor: int,
    gpu: Gpu,
    assumed: Mapping[str, float],
    from_replica: bool = False,
) -> float:
    """Return the seconds to send an update from the trainer, or from a replica, to a replica of `tensor` GPUs
    on another node. The trainer sends over gloo."""
    engine = [serving_spans(shape, tensor, rank) for rank in range(tensor)]
    sources = dict(enumerate(engine)) if from_replica else use.spans
    first = -(-len(sources) // gpu.per_node) * gpu.per_node  # on another node than the last source
    replica = {first + rank: spans for rank, spans in enumerate(engine)}
    adapters = served_adapters(use.config.model.lora, shape)
    rows = transfer(shape, sources, replica, adapters, from_replica)
    alike, size = layers_to_plan(shape, use.layout), use.dtype.itemsize
    moves = exchange(*rows[:3], alike, size, gpu, rows.changed)
    seconds = moves.seconds / assumed["network_share"]
    return seconds if from_replica else max(seconds, moves.busiest_rank / (1e9 * assumed["host_rate"]))
