"""Check that a model can be divided as `parallel` and `rollout.engine_tensor` say: for training and serving.

Uses neither torch nor a process group. Every function raises ConfigError with field, value and remedy.
"""

from collections.abc import Iterator
from dataclasses import replace

from megatron_stppo.config import Config, ConfigError, ParallelConfig
from megatron_stppo.config.section import Rule, enforce
from megatron_stppo.parallel.layout import Layout, divisors
from megatron_stppo.weights.sharding.hf_names import ModelShape, read_shape


def check_parallel(config: Config, world_size: int) -> Layout:
    """Return the training layout. Raises ConfigError unless it fits the ranks and the model."""
    parallel, shape = config.parallel, read_shape(config.model.path)
    problem = "parallel.sequence=true: there is nothing to split with parallel.tensor=1"
    enforce([Rule(parallel.sequence and parallel.tensor == 1, problem, "set it to false")])
    layout = Layout.of_world(world_size, parallel)
    check_model_layout(shape, parallel, layout)
    enforce(_model_type(config, shape))
    return layout


def _model_type(config: Config, shape: ModelShape) -> Iterator[Rule]:
    """Return the rules about fields that models of a type exclude."""
    replay = config.algorithm.routing_replay
    yield Rule(
        bool(shape.only_local) and config.model.layers == "transformer_engine",
        f"model.layers=transformer_engine: only local layers have {shape.only_local} "
        f"(model_type={shape.family})",
        "set it to local",
    )
    for role in ("actor", "critic"):
        yield Rule(
            bool(shape.float32) and not config.update.optimizer(role).distributed,
            f"update.{role}.distributed=false: weights of model_type={shape.family} have two types in "
            "bfloat16; megatron saves only a distributed optimizer of such",
            "set it to true",
        )
    yield Rule(
        replay != "off" and not shape.experts,
        f"algorithm.routing_replay={replay}: the model has no experts",
        "set it to off",
    )


def check_model_layout(shape: ModelShape, parallel: ParallelConfig, layout: Layout) -> None:
    """Raise ConfigError unless megatron can divide a model of this shape so."""
    check_layout(shape, parallel.tensor)
    check_stages(shape, layout)
    enforce(of_layers(shape, parallel))


def of_layers(shape: ModelShape, parallel: ParallelConfig) -> Iterator[Rule]:
    """Return the rules about the parallelism of experts and of recurrent layers."""
    yield Rule(
        shape.experts % parallel.expert > 0,
        f"parallel.expert={parallel.expert} must divide the model's {shape.experts} experts",
        f"choose from {divisors(shape.experts)}",
    )
    yield Rule(
        not shape.experts and parallel.expert > 1,
        f"parallel.expert={parallel.expert}: the model has no experts",
        "set it to 1",
    )
    yield Rule(
        bool(shape.experts) and parallel.tensor > 1 and not parallel.sequence,
        f"parallel.sequence=false: with parallel.tensor={parallel.tensor} megatron trains experts under "
        "sequence parallelism only",
        "set it to true",
    )
    sizes = {"hidden_size": (shape.hidden, 8), shape.ffn_field: (shape.ffn, 8 * parallel.tensor)}
    for name, (size, unit) in sizes.items():
        yield Rule(
            bool(shape.experts) and size % unit > 0,
            f"model.{name}={size}: the products of experts need a multiple of {unit} with "
            f"parallel.tensor={parallel.tensor}",
            "use a smaller parallel.tensor, or another model",
        )
    yield Rule(
        bool(shape.recurrent_layers) and parallel.context > 1,
        f"parallel.context={parallel.context}: {shape.recurrent_layers} of the model's {shape.layers} "
        "layers are recurrent: they pass a state from token to token",
        "set it to 1, and raise parallel.tensor instead",
    )


def check_engine(config: Config, world_size: int) -> None:
    """Raise ConfigError unless the engine's tensor parallel size fits the model and, if it runs on the
    trainer's ranks, their number."""
    tensor = config.engine_tensor
    if config.serving.replicas is None and world_size % tensor:
        choices = ", ".join(map(str, divisors(world_size)))
        raise ConfigError(
            f"rollout.engine_tensor={tensor} must divide the number of ranks {world_size}; choose {choices}"
        )
    shape = read_shape(config.model.path)
    check_layout(shape, tensor, field="rollout.engine_tensor", serving=True)
    if shape.gpu_attention and (name := config.rollout.vllm.get("attention_backend")):
        raise ConfigError(
            f"rollout.vllm.attention_backend={name}: follows from model_type={shape.family}, whose weights "
            "another backend may copy before they are updated; remove it"
        )
    if shape.ffn_over_world and config.serving.replicas is None and shape.ffn % world_size:
        raise ConfigError(
            f"model.intermediate_size={shape.ffn}: vLLM's {shape.family} needs a multiple of the number of "
            f"ranks {world_size}; choose another number, or serve on other nodes (serving.replicas)"
        )


def engine_sizes(shape: ModelShape) -> frozenset[int]:
    """Return the numbers of tensor-parallel ranks over which vLLM can shard the model."""
    return frozenset(t for t in range(1, shape.heads + 1) if not _obstacle(shape, t, serving=True))


def with_fitting_layout(config: Config, world_size: int) -> Config:
    """Return `config` if its `parallel` fits the ranks, else a copy where every rank holds the whole model.

    For `convert` and `audit`, whose input and output are the same under every layout.
    """
    try:
        Layout.of_world(world_size, config.parallel)
    except ConfigError:
        return config.changed(parallel=ParallelConfig())
    return config


def check_layout(
    shape: ModelShape, tensor: int, *, field: str = "parallel.tensor", serving: bool = False
) -> None:
    """Raise ConfigError unless megatron (with serving=True: vLLM) can shard the model over `tensor` ranks.

    field: the name of the configuration field in the error message.
    """
    if reason := _obstacle(shape, tensor, serving):
        works = [t for t in range(1, max(8, tensor) + 1) if not _obstacle(shape, t, serving)]
        raise ConfigError(f"{field}={tensor} {reason}; choose {_listed(works)}")


def check_stages(shape: ModelShape, layout: Layout) -> None:
    """Raise ConfigError unless the layers can be divided among pipeline ranks and their model chunks."""
    ends = {"first_stage_layers": layout.first_stage_layers, "last_stage_layers": layout.last_stage_layers}
    uneven = "".join(f", parallel.{name}={value}" for name, value in ends.items() if value)
    if layout.pipeline == 1 and (layout.virtual > 1 or uneven):
        raise ConfigError(
            f"parallel.virtual={layout.virtual}{uneven}: parallel.pipeline=1 has one stage; remove them, "
            "or raise parallel.pipeline"
        )
    plain = replace(layout, virtual=1)
    if plain.stage_sizes(shape.layers) is None:
        works = [
            p for p in range(1, shape.layers + 1) if replace(plain, pipeline=p).stage_sizes(shape.layers)
        ]
        raise ConfigError(
            f"parallel.pipeline={layout.pipeline}{uneven} must divide model.num_hidden_layers={shape.layers}"
            f"{' minus those' if uneven else ''}; choose {_listed(works) if works else 'other stages'}"
            + ("" if uneven else ", or set parallel.first_stage_layers or parallel.last_stage_layers")
        )
    if layout.stage_sizes(shape.layers) is None:
        sizes = sorted(set(plain.stage_sizes(shape.layers) or []))
        works = [v for v in range(1, min(sizes) + 1) if not any(size % v for size in sizes)]
        raise ConfigError(
            f"parallel.virtual={layout.virtual} must divide the {_listed(sizes)} layers of a pipeline rank; "
            f"choose {_listed(works)}"
        )


def _obstacle(shape: ModelShape, tensor: int, serving: bool) -> str | None:
    if shape.heads % tensor:
        return f"must divide model.num_attention_heads={shape.heads}"
    if shape.kv_heads % tensor and tensor % shape.kv_heads:
        return f"must divide or be a multiple of model.num_key_value_heads={shape.kv_heads}"
    for name, size in shape.divided.items():
        if size % tensor:
            return f"must divide model.{name}={size}"
    rows = [mixer.joint_rows for mixer in shape.mixers if not serving and mixer.joint_rows % tensor]
    if rows:
        return f"must divide the {rows[0]} rows of the joint q, k, v projection"
    if serving and not shape.repeats_kv_heads and tensor > shape.kv_heads:
        return f"exceeds model.num_key_value_heads={shape.kv_heads}, which vLLM does not repeat"
    if serving and 0 < shape.experts < tensor:
        return f"exceeds the model's {shape.experts} experts"
    padded = -(-shape.vocab // 64) * 64
    if serving and padded % tensor:
        return f"must divide model.vocab_size={shape.vocab} padded to {padded}"
    return None


def _listed(values: list[int]) -> str:
    *first, last = map(str, values)
    return f"{', '.join(first)} or {last}" if first else last
