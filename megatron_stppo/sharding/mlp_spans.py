"""Where the rows of a layer's MLP live: one of a dense model, or a router and its experts.

A dense MLP and an expert are cut alike, over the tensor axis. Which experts a training rank holds is
Layout.expert_rank; an engine rank holds its rows of all of them.
"""

from __future__ import annotations

from typing import Literal

from megatron_stppo.config import ConfigError, ParallelConfig
from megatron_stppo.parallel.layout import Layout
from megatron_stppo.sharding.hf_names import ModelShape
from megatron_stppo.sharding.tiles import Span, tile, whole

LayerSpec = Literal["local", "transformer_engine"]  # whose layers: they name some weights differently
EXPERT = {
    "local": "experts.local_experts.{expert}.{linear}.weight",
    "transformer_engine": "experts.{linear}.weight{expert}",
}


def training_mlp(
    shape: ModelShape, layout: Layout, rank: int, layer: int, target: str, spec: LayerSpec
) -> dict[str, tuple[Span, ...]]:
    """megatron's, under `target` ("decoder.layers.0.mlp."). Experts count from 0 on every rank."""
    tensor, ffn = layout.coordinates(rank).tensor, shape.ffn // layout.tensor
    names: tuple[str, ...]
    if not shape.experts:
        names = (target + "linear_fc1.weight", target + "linear_fc2.weight")
        return _mlp(shape, layer, None, tensor, ffn, names)
    spans = {target + "router.weight": whole(shape.router(layer), shape.experts)}
    each = shape.experts // layout.expert
    for local in range(each):
        names = tuple(target + EXPERT[spec].format(expert=local, linear=f"linear_fc{i}") for i in (1, 2))
        expert = layout.expert_rank(rank) * each + local
        spans |= _mlp(shape, layer, expert, tensor, ffn, names)
    return spans


def serving_mlp(shape: ModelShape, layer: int, size: int, tensor: int) -> dict[str, tuple[Span, ...]]:
    """vLLM's on tensor rank `tensor` of `size`. It stacks the experts; the engine numbers their slices."""
    prefix, ffn = shape.mlp_prefix(layer), shape.ffn // size
    if not shape.experts:
        names = (prefix + "gate_up_proj.weight", prefix + "down_proj.weight")
        return _mlp(shape, layer, None, tensor, ffn, names)
    spans = {shape.router(layer): whole(shape.router(layer), shape.experts)}
    stacks = prefix + "experts.routed_experts."
    for expert in range(shape.experts):
        names = (f"{stacks}w13_weight.{expert}", f"{stacks}w2_weight.{expert}")
        spans |= _mlp(shape, layer, expert, tensor, ffn, names)
    return spans


def check_experts(shape: ModelShape, parallel: ParallelConfig) -> None:
    """Raises ConfigError unless megatron can train the experts so."""
    if shape.experts % parallel.expert:
        works = [n for n in range(1, shape.experts + 1) if shape.experts % n == 0]
        raise ConfigError(
            f"parallel.expert={parallel.expert} must divide the model's {shape.experts} experts; "
            f"choose from {works}"
        )
    if not shape.experts and parallel.expert > 1:
        raise ConfigError(f"parallel.expert={parallel.expert}: the model has no experts; set it to 1")
    if shape.experts and parallel.tensor > 1 and not parallel.sequence:
        raise ConfigError(
            f"parallel.sequence=false: megatron trains experts with parallel.tensor={parallel.tensor} under "
            "sequence parallelism only; set it to true"
        )


def _mlp(
    shape: ModelShape, layer: int, expert: int | None, tensor: int, rows: int, names: tuple[str, ...]
) -> dict[str, tuple[Span, ...]]:
    """[gate of this rank; up of this rank], and this rank's columns of down; on both sides, as `names`."""
    gate, up, down = shape.projections(layer, expert)
    return {
        names[0]: tile(0, [(key, tensor * rows, rows) for key in (gate, up)]),
        names[1]: tile(1, [(down, tensor * rows, rows)]),
    }
