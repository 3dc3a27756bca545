"""Describes which rows of a layer's MLP each rank holds: a dense MLP, or a router with its experts.

A dense MLP and an expert are both sharded over the tensor axis. Layout.expert_rank determines which experts a
training rank holds. A serving rank holds its rows of all experts.
"""

from __future__ import annotations

from typing import Literal

from megatron_stppo.parallel.layout import Layout
from megatron_stppo.weights.sharding.hf_names import ModelShape
from megatron_stppo.weights.sharding.tiles import Span, tile, whole

LayerSpec = Literal["local", "transformer_engine"]  # some weights have different names in the two
EXPERT = {
    "local": "experts.local_experts.{expert}.{linear}.weight",
    "transformer_engine": "experts.{linear}.weight{expert}",
}


def training_mlp(
    shape: ModelShape, layout: Layout, rank: int, layer: int, target: str, spec: LayerSpec
) -> dict[str, tuple[Span, ...]]:
    """Return the spans of megatron's MLP parameters, whose names begin with `target`.

    target: for example "decoder.layers.0.mlp.". Local expert numbers start at 0 on every rank.
    """
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
    """Return the spans of vLLM's MLP parameters on tensor rank `tensor` of `size`.

    vLLM stacks the experts in one tensor; here each expert's slice has a name that ends with its number.
    """
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


def _mlp(
    shape: ModelShape, layer: int, expert: int | None, tensor: int, rows: int, names: tuple[str, ...]
) -> dict[str, tuple[Span, ...]]:
    """Return the spans of the two tensors `names`: this rank's rows of gate, then of up; and this rank's
    columns of down. megatron and vLLM use the same arrangement."""
    gate, up, down = shape.projections(layer, expert)
    return {
        names[0]: tile(0, [(key, tensor * rows, rows) for key in (gate, up)]),
        names[1]: tile(1, [(down, tensor * rows, rows)]),
    }
