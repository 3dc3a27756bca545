"""The plan of a run on any number of GPUs: its layout, memory, reshard and lower bounds of its times.

No GPU is needed. megatron's modules are the real ones, on meta tensors. vLLM's memory is estimated by
arithmetic (usage.py).
"""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from megatron_stppo.config import Config, ConfigError
from megatron_stppo.data.division import Packer
from megatron_stppo.model import build, fusions
from megatron_stppo.model.layers import layer_spec
from megatron_stppo.model.offload import Offload
from megatron_stppo.model.pipeline import packer_of
from megatron_stppo.parallel import groups
from megatron_stppo.parallel.layout import Layout
from megatron_stppo.plan.assumptions import H100, Gpu, communicator
from megatron_stppo.plan.memory import RankModels
from megatron_stppo.plan.times import Bounds, ReshardCost, bounds, exchange, layers_to_plan, shard_bytes
from megatron_stppo.plan.usage import EngineUse, HostUse, StageUse, TrainingUse, broken
from megatron_stppo.plan.work import (
    Kind,
    RecordedBatch,
    Sharing,
    Work,
    fullest_microbatch,
    kinds,
    standing_at,
)
from megatron_stppo.weights.reshard.resharder import mismatch
from megatron_stppo.weights.sharding.hf_names import ModelShape, read_shape
from megatron_stppo.weights.sharding.spans import row_widths, serving_layouts, serving_spans, training_layouts
from megatron_stppo.weights.sharding.tiles import Spans

# Settings of megatron. Weights have no values here, so that no random values and no master weights on the
# host are made.
WITHOUT_VALUES = {"use_cpu_initialization": False, "perform_initialization": False}


@dataclass(frozen=True)
class Plan:
    """The plan of a run on a number of GPUs: what it needs, and which limits it violates (`broken`)."""

    gpu: Gpu
    shape: ModelShape
    use: TrainingUse
    engine: EngineUse
    exchange: ReshardCost
    host: HostUse
    bounds: Bounds
    broken: tuple[str, ...]

    @property
    def beside(self) -> tuple[EngineUse, int, Offload]:
        """The arguments of StageUse.phases and StageUse.totals: engine, bytes of staging, offload setting."""
        return self.engine, self.exchange.staging, self.use.config.update.offload


def training_use(
    config: Config, shape: ModelShape, gpus: int, gpu: Gpu = H100, source: RecordedBatch | None = None
) -> TrainingUse:
    """Build and measure one rank of each kind, of `gpus` GPUs that train.

    source: trajectories on which shared prefixes are measured.
    Raises ConfigError for a configuration that cannot be built.
    """
    layout, dtype = Layout.of_world(gpus, config.parallel), planned_dtype(config)
    spec = layer_spec(config)
    fused = fusions.fields(fusions.Place.of(config, shape, gpu.is_cuda), config.megatron)
    config = config.changed(megatron=WITHOUT_VALUES | config.megatron | fused)
    training = training_layouts(shape, layout, spec=spec)
    stages: list[StageUse] = []
    for kind in kinds(layout, training):
        with standing_at(kind.rank, gpus, config) as mesh:
            packer = packer_of(config, shape, mesh)
            work, tokens, of_kind = _of_kind(config, shape, packer, dtype, kind, training[kind.rank], gpu)
            stages += of_kind
    stages.sort(key=lambda stage: stage.stage)
    sharing = Sharing.of(config, packer, source)
    return TrainingUse(config, layout, spec, dtype, training, work, tokens, sharing, tuple(stages))


def plan(config: Config, gpus: int, gpu: Gpu = H100, source: RecordedBatch | None = None) -> Plan:
    """Return the plan of a run on `gpus` GPUs. source: as in training_use.

    Raises ConfigError for a configuration that cannot be built, PlanError for a reshard that would lose rows.
    """
    shape = read_shape(config.model.path)
    return plan_of(training_use(config, shape, gpus, gpu, source), shape, gpu)


def plan_of(use: TrainingUse, shape: ModelShape, gpu: Gpu = H100) -> Plan:
    """Return the plan of a run in which all GPUs of `use` train and serve. Raises PlanError."""
    gpus = use.layout.world
    config, size, widths = use.config, use.dtype.itemsize, row_widths(shape)
    alike = layers_to_plan(shape, use.layout)
    serving = serving_layouts(shape, gpus, config.engine_tensor)
    engine = engine_use(config, shape, gpu)
    if gpus > 1 and gpu.is_cuda:
        reshard = communicator(range(gpus), "swap", gpu.per_node)
        engine = replace(engine, communicators=engine.communicators + reshard)
    moves = exchange(use.spans, serving, widths, alike, size, gpu)
    return Plan(
        gpu=gpu,
        shape=shape,
        use=use,
        engine=engine,
        exchange=moves,
        host=HostUse.of(use, shape, gpu.per_node),
        bounds=bounds(use, shape, engine, moves.seconds, gpu),
        broken=tuple(broken(use, gpu, engine, moves.staging)),
    )


def engine_use(config: Config, shape: ModelShape, gpu: Gpu) -> EngineUse:
    """Return the memory of the GPU of an engine that needs most. Adapters are not counted."""
    tensor, size, widths = config.engine_tensor, planned_dtype(config).itemsize, row_widths(shape)
    shards = [serving_spans(shape, tensor, rank) for rank in range(tensor)]
    weights = max(shard_bytes(spans, widths, size) for spans in shards)
    return EngineUse.of(config, shape, weights, size, gpu)


def _of_kind(
    config: Config,
    shape: ModelShape,
    packer: Packer,
    dtype: torch.dtype,
    kind: Kind,
    spans: Spans,
    gpu: Gpu,
) -> tuple[Work, int, list[StageUse]]:
    """Measure the ranks of one kind.

    Return (work of a rank, tokens of the measured micro-batch, StageUse of every stage of this kind).
    """
    mesh, cut = packer.mesh, packer.spec
    policy = build.named_parameters(build.build("actor", shape, config, mesh, dtype))
    problem = mismatch("training", policy, spans, row_widths(shape), all_named=False)
    if problem:
        raise ConfigError(f"model.path={config.model.path}: {problem} megatron builds another model")
    work, microbatch = Work.of(config, cut, mesh.data_size), fullest_microbatch(config, cut)
    rank = RankModels(config, shape, mesh, dtype, microbatch, gpu.is_cuda)
    roles: dict[build.Role, bool] = {
        "actor": True,
        "critic": config.needs_critic,
        "reference": config.needs_reference,
    }
    models, trunk, buffers = rank.uses([role for role, is_needed in roles.items() if is_needed])
    rows = max(config.update.logit_rows, config.rollout.max_turn_tokens)
    columns = shape.padded_vocab(mesh.tensor_size) // mesh.tensor_size
    size = torch.float32.itemsize if config.model.float32_logits(gpu.is_cuda) else dtype.itemsize
    logits = min(rows, len(microbatch.target_T)) * columns * size
    communicators = sum(
        communicator(dist.get_process_group_ranks(group), kind, gpu.per_node)
        for group, kind in groups.exchanges(mesh, config, shape.experts > 0, shape.tied)
    )
    layers = sum(len(run) for run in mesh.layout.chunks(shape.layers, mesh.pipeline_rank))
    stages = [
        StageUse(
            stage=stage,
            ranks=count,
            layers=layers,
            models=models,
            scored=tuple(role for role in models if role != "actor" or config.scores_actor),
            in_flight={
                role: use.in_flight(mesh.layout, stage, work.microbatches) for role, use in models.items()
            },
            trunk=trunk,
            buffers=buffers,
            communicators=communicators if gpu.is_cuda else 0,
            logits=logits if stage == mesh.layout.pipeline - 1 else 0,
        )
        for stage, count in kind.stages.items()
    ]
    return work, microbatch.tokens, stages


def planned_dtype(config: Config) -> torch.dtype:
    """Return the type of the weights, as process.dtype chooses it on a GPU."""
    name = config.model.dtype
    return torch.bfloat16 if name == "auto" else getattr(torch, name)
