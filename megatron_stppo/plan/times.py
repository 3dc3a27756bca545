"""Times of an iteration on GPUs, from FLOP, bytes and the GPU's peak rates. Nothing here was measured.

Bounds divide by the peak rates, and every trajectory has the greatest length that is allowed: a real run
takes longer. Speeds are those of the simulation; the shares of the peak rates are assumed (assumptions.py).
Where trajectories share prefixes, score and update take the share of the time that the computed tokens are of
all tokens. The head, which computes the action tokens of every trajectory, in fact takes more.

The cost of the reshard of a whole cluster is the bytes over each link. All layers of one model chunk have the
same layout on its ranks, so one layer can be planned and counted for all. The numbers of bytes are then
exact, but which of several holders sends is chosen once for all these layers.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass

from megatron_stppo.config import Config
from megatron_stppo.observe.throughput import forward_flop
from megatron_stppo.parallel.layout import Layout
from megatron_stppo.plan.assumptions import Gpu
from megatron_stppo.plan.simulation.engine import EngineSpeed, TrainerSpeed
from megatron_stppo.plan.usage import EngineUse, StageUse, TrainingUse
from megatron_stppo.weights.reshard.plan import BUCKET_BYTES, lower_bound, plan_copies
from megatron_stppo.weights.sharding.hf_names import ModelShape
from megatron_stppo.weights.sharding.low_rank import served_adapters, transfer
from megatron_stppo.weights.sharding.spans import serving_spans
from megatron_stppo.weights.sharding.tiles import PADDING, Spans


@dataclass(frozen=True)
class ReshardCost:
    """What a reshard costs, over all ranks unless a field names one."""

    copies: int
    moved: int  # bytes between ranks
    least: int  # bytes that any plan must move between ranks
    at_home: int  # bytes copied within a rank
    between_nodes: int  # bytes
    busiest_rank: int  # bytes that it sends or receives, whichever is more
    busiest_node: int  # bytes that it sends to or receives from other nodes, whichever is more
    seconds: float  # a lower bound, by the busiest link

    @property
    def ratio(self) -> float:
        """Bytes moved, divided by the least; 1 if both are 0."""
        return 1.0 if self.moved == self.least else self.moved / max(self.least, 1)

    @property
    def staging(self) -> int:
        """Bytes of a rank's buffers: two to send and two to receive a bucket."""
        return 4 * min(BUCKET_BYTES["cuda"], self.busiest_rank)


def exchange(
    sources: Mapping[int, Spans],
    targets: Mapping[int, Spans],
    widths: Mapping[str, int],
    alike: Mapping[int, int],
    size: int,
    gpu: Gpu,
    changed: Collection[str] | None = None,
) -> ReshardCost:
    """Return the cost of a reshard from `sources` to `targets`.

    widths: {hf_key: elements per row}; alike: {planned layer: number of layers that it is counted for};
    size: bytes per element that is sent; changed: the checkpoint tensors that are sent (None: all). Raises
    PlanError if no source has a row of a target.
    """
    sources, targets = _only(sources, alike), _only(targets, alike)
    layers = {key: layer_of(key) for key in widths}
    weights = {key: 1 if layer is None else alike.get(layer, 0) for key, layer in layers.items()}
    if changed is not None:
        weights = {key: weight if key in changed else 0 for key, weight in weights.items()}
    widths = {key: width * weights[key] for key, width in widths.items()}  # one row of each counted layer
    links: dict[tuple[str, str, int], int] = defaultdict(int)  # {(rank or node, in or out, number): bytes}
    copies = moved = at_home = between = 0
    for copy in plan_copies(sources, targets, widths, ranks_per_node=gpu.per_node, keys=changed):
        copies += weights[copy.hf_key]
        sent = copy.size * widths[copy.hf_key] * size
        if copy.source_rank == copy.target_rank:
            at_home += sent
            continue
        moved += sent
        links["rank", "out", copy.source_rank] += sent
        links["rank", "in", copy.target_rank] += sent
        source, target = copy.source_rank // gpu.per_node, copy.target_rank // gpu.per_node
        if source != target:
            between += sent
            links["node", "out", source] += sent
            links["node", "in", target] += sent
    rank, node = (
        max((n for (kind, _, _), n in links.items() if kind == of), default=0) for of in ("rank", "node")
    )
    least = lower_bound(sources, targets, widths) * size
    seconds = max(rank / gpu.node_rate, node / gpu.network_rate)
    return ReshardCost(copies, moved, least, at_home, between, rank, node, seconds)


def layers_to_plan(shape: ModelShape, layout: Layout) -> dict[int, int]:
    """Return `alike` for a model: {first layer of a kind in a model chunk: how many of this kind are in it}.

    Every layer is planned, unless the model has experts, which would take millions of copies.
    Example: 8 layers with experts on 2 stages: {0: 4, 4: 4}.
    """
    if not shape.experts:
        return dict.fromkeys(range(shape.layers), 1)
    alike = Counter[int]()
    for run in (run for stage in range(layout.pipeline) for run in layout.chunks(shape.layers, stage)):
        first: dict[object, int] = {}
        alike.update(first.setdefault(shape.mixers[layer], layer) for layer in run)
    return alike


def layer_of(hf_key: str) -> int | None:
    parts = hf_key.split(".")
    return int(parts[2]) if parts[:2] == ["model", "layers"] else None


def _only(layouts: Mapping[int, Spans], layers: Container[int]) -> dict[int, Spans]:
    """Return the layouts without the tensors of other layers. Ranks that shared a layout still share it."""
    thinned: dict[int, Spans] = {}
    for spans in layouts.values():
        if id(spans) not in thinned:
            thinned[id(spans)] = {
                name: parts
                for name, parts in spans.items()
                if any((layer := layer_of(span.hf_key)) is None or layer in layers for span in parts)
            }
    return {rank: thinned[id(spans)] for rank, spans in layouts.items()}


def shard_bytes(spans: Spans, widths: Mapping[str, int], size: int) -> int:
    """Return the bytes of a rank's tensors, including padding.

    A tensor of padding alone is a part of the vocabulary, with the row width of the embedding, or the bias of
    an expert.
    """
    total, vocabulary = 0, max(widths[key] for key in widths if "embed" in key)
    for name, parts in spans.items():
        alone = 1 if ".experts." in name else vocabulary
        width = next((widths[span.hf_key] for span in parts if span.hf_key != PADDING), alone)
        total += (parts[-1].local + parts[-1].size) * width * size
    return total


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
