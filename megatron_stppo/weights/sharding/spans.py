"""Describes where the rows of a checkpoint are: on a training rank, on a serving rank, in the checkpoint.

The functions here do not move or convert weights. The resharding into the engine, the import and the export
use these three descriptions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from megatron_stppo.parallel.layout import Layout
from megatron_stppo.weights.sharding.hf_names import (
    EMBEDDING,
    HEAD,
    NORM,
    VALUE,
    VALUE_BIAS,
    Head,
    ModelShape,
    hf_shapes,
)
from megatron_stppo.weights.sharding.tiles import PADDING, Part, Span, Spans, cut, tile, whole

LayerSpec = Literal["local", "transformer_engine"]  # some weights have different names in the two
EXPERT = {
    "local": "experts.local_experts.{expert}.{linear}.weight",
    "transformer_engine": "experts.{linear}.weight{expert}",
}
STACKS = ("w13_weight", "w2_weight", "w13_bias", "w2_bias")  # vLLM's tensors of all experts of a layer
# w2 is Mixtral's down projection; of an adapter B A, A has the columns
ROW_PARALLEL = (
    "o_proj.weight",
    "out_proj.weight",  # of a gated delta net
    "down_proj.weight",
    ".down.weight",
    "w2.weight",
    "o_proj.lora_A.weight",
    "down_proj.lora_A.weight",
)


def training_spans(
    shape: ModelShape,
    layout: Layout,
    rank: int,
    *,
    spec: LayerSpec = "local",
    head: Head = "vocabulary",
    tied_copy: bool = False,
) -> dict[str, tuple[Span, ...]]:
    """Return the spans of this rank's megatron parameters.

    With several model chunks, names begin with `chunk_prefix`. head: "value" is that of a critic, "none"
    leaves it out. tied_copy=True adds the copy of a tied embedding that megatron keeps on the last of several
    stages. An import must fill this copy; a reshard or an export reads the first stage's.
    """
    tensor, stage = (at := layout.coordinates(rank)).tensor, at.pipeline
    padded, spans = shape.padded_vocab(layout.tensor), {}
    for chunk, layers in enumerate(layout.chunks(shape.layers, stage)):
        prefix = chunk_prefix(layout.virtual, chunk)
        if stage == chunk == 0:
            spans[prefix + "embedding.word_embeddings.weight"] = _vocabulary(
                EMBEDDING, shape, padded, tensor, layout.tensor
            )
        for local, layer in enumerate(layers):
            source, target = f"model.layers.{layer}.", f"{prefix}decoder.layers.{local}."
            spans |= _training_mixer(shape, layer, layout.tensor, tensor, source, target)
            spans |= _norms(shape, source, target, spec)
            spans |= _training_mlp(shape, layout, rank, layer, target + "mlp.", spec)
        if (stage, chunk) != (layout.pipeline - 1, layout.virtual - 1):
            continue
        spans[prefix + "decoder.final_layernorm.weight"] = whole(NORM, shape.hidden)
        output = prefix + "output_layer.weight"
        if head == "value":
            spans |= {output: whole(VALUE, 1), prefix + "output_layer.bias": whole(VALUE_BIAS, 1)}
        if head == "vocabulary" and not shape.tied:
            spans[output] = _vocabulary(HEAD, shape, padded, tensor, layout.tensor)
        if head == "vocabulary" and shape.tied and tied_copy and layout.pipeline > 1:
            spans[output] = _vocabulary(EMBEDDING, shape, padded, tensor, layout.tensor)
    return spans


def chunk_prefix(virtual: int, chunk: int) -> str:
    """Return the prefix of parameter names on a pipeline rank with several model chunks, for example "1.";
    empty with one chunk."""
    return f"{chunk}." if virtual > 1 else ""


def _norms(shape: ModelShape, source: str, target: str, spec: LayerSpec) -> dict[str, tuple[Span, ...]]:
    fused = spec == "transformer_engine"
    names = (
        "self_attention.linear_qkv.layer_norm_weight" if fused else "input_layernorm.weight",
        "mlp.linear_fc1.layer_norm_weight" if fused and not shape.experts else "pre_mlp_layernorm.weight",
    )
    return {
        target + names[0]: whole(source + "input_layernorm.weight", shape.hidden),
        target + names[1]: whole(source + "post_attention_layernorm.weight", shape.hidden),
    }


def _training_mixer(
    shape: ModelShape, layer: int, size: int, tensor: int, source: str, target: str
) -> dict[str, tuple[Span, ...]]:
    """Return the spans of a layer's attention or gated delta net."""
    net, target = shape.delta_net_of(layer), target + "self_attention."
    if net is not None:
        return net.training_spans(source + "linear_attn.", target, size, tensor)
    heads, source = shape.heads * shape.head_dim // size, source + "self_attn."
    spans = {target + "linear_proj.weight": tile(1, [(source + "o_proj.weight", tensor * heads, heads)])}
    for kind in ("weight", "bias") if shape.qkv_bias else ("weight",):
        spans[f"{target}linear_qkv.{kind}"] = _grouped_qkv(shape, size, tensor, source, kind)
    if shape.bias:
        spans[target + "linear_proj.bias"] = whole(source + "o_proj.bias", shape.hidden)
    if shape.sinks:
        own = shape.heads // size
        spans[target + "core_attention.sinks"] = tile(0, [(source + "sinks", tensor * own, own)])
    for x in "qk" if shape.qk_norm else "":
        spans[f"{target}{x}_layernorm.weight"] = whole(f"{source}{x}_norm.weight", shape.head_dim)
    return spans


def _grouped_qkv(shape: ModelShape, size: int, tensor: int, prefix: str, kind: str) -> tuple[Span, ...]:
    """Return the spans of megatron's linear_qkv: query heads, their gates, key and value of each KV group.

    The rows are divided evenly over the tensor axis. With more tensor ranks than KV groups, a boundary may be
    anywhere inside a group (megatron gathers the activations of the group). A rank may then hold only query
    rows, or a part of a key.
    """
    dim, heads = shape.head_dim, shape.heads // shape.kv_heads
    q_proj, parts = f"{prefix}q_proj.{kind}", list[Part]()
    for group in range(shape.kv_heads):
        if shape.output_gate:  # q_proj has the queries of a head, then its gate, then the next head
            for half in (0, dim):
                parts += [(q_proj, 2 * dim * (group * heads + n) + half, dim) for n in range(heads)]
        else:
            parts.append((q_proj, group * heads * dim, heads * dim))
        parts += [
            (f"{prefix}k_proj.{kind}", group * dim, dim),
            (f"{prefix}v_proj.{kind}", group * dim, dim),
        ]
    rows = (shape.query_rows + 2 * shape.kv_heads * dim) // size
    return cut(tile(0, parts), tensor * rows, rows)


def serving_spans(shape: ModelShape, tensor_size: int, tensor: int) -> dict[str, tuple[Span, ...]]:
    """Return the spans of the engine's parameters (vLLM's modules) on tensor rank `tensor` of `tensor_size`.

    vLLM pads the vocabulary to a multiple of 64. If there are fewer KV heads than tensor ranks, it repeats
    each KV head on tensor_size / kv_heads ranks. A tied model has no lm_head parameter.
    """
    padded = -(-shape.vocab // 64) * 64
    spans = {EMBEDDING: _vocabulary(EMBEDDING, shape, padded, tensor, tensor_size)}
    if not shape.tied:
        spans[HEAD] = _vocabulary(HEAD, shape, padded, tensor, tensor_size)
    spans[NORM] = whole(NORM, shape.hidden)
    for layer in range(shape.layers):
        prefix, net = f"model.layers.{layer}.", shape.delta_net_of(layer)
        if net is None:
            spans |= _serving_attention(shape, prefix + "self_attn.", tensor_size, tensor)
        else:
            spans |= net.serving_spans(prefix + "linear_attn.", tensor_size, tensor)
        spans |= _serving_mlp(shape, layer, tensor_size, tensor)
        for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            spans[prefix + norm] = whole(prefix + norm, shape.hidden)
    return {served_name(shape, name): of for name, of in spans.items()}


def served_name(shape: ModelShape, name: str) -> str:
    """Return vLLM's name of a parameter, which in one family differs from that of the checkpoint."""
    if not shape.sinks:
        return name
    return name.replace(".self_attn.", ".attn.").replace("embed_tokens", "embedding")


def _serving_attention(shape: ModelShape, prefix: str, size: int, tensor: int) -> dict[str, tuple[Span, ...]]:
    queries, heads = shape.query_rows // size, shape.heads * shape.head_dim // size
    keys = max(1, shape.kv_heads // size) * shape.head_dim
    key_rank = tensor // max(1, size // shape.kv_heads)
    spans = {}
    for kind in ("weight", "bias") if shape.qkv_bias else ("weight",):
        parts = [
            (f"{prefix}q_proj.{kind}", tensor * queries, queries),
            (f"{prefix}k_proj.{kind}", key_rank * keys, keys),
            (f"{prefix}v_proj.{kind}", key_rank * keys, keys),
        ]
        spans[f"{prefix}qkv_proj.{kind}"] = tile(0, parts)
    spans[prefix + "o_proj.weight"] = tile(1, [(prefix + "o_proj.weight", tensor * heads, heads)])
    if shape.bias:  # vLLM adds it on the first rank
        spans[prefix + "o_proj.bias"] = whole(prefix + "o_proj.bias", shape.hidden)
    if shape.sinks:
        own = shape.heads // size
        spans[prefix + "sinks"] = tile(0, [(prefix + "sinks", tensor * own, own)])
    for x in "qk" if shape.qk_norm else "":
        spans[f"{prefix}{x}_norm.weight"] = whole(f"{prefix}{x}_norm.weight", shape.head_dim)
    return spans


def _training_mlp(
    shape: ModelShape, layout: Layout, rank: int, layer: int, target: str, spec: LayerSpec
) -> dict[str, tuple[Span, ...]]:
    """Return the spans of megatron's MLP parameters, whose names begin with `target`.

    target: for example "decoder.layers.0.mlp.". Local expert numbers start at 0 on every rank.
    """
    tensor, ffn = layout.coordinates(rank).tensor, shape.ffn // layout.tensor
    names: tuple[str, ...]
    if not shape.experts:
        names = (target + "linear_fc1.weight", target + "linear_fc2.weight")
        return _mlp(shape.projections(layer), tensor, ffn, names)
    spans = {target + "router.weight": whole(shape.router(layer), shape.experts)}
    if shape.bias:
        spans[target + "router.bias"] = whole(shape.router_bias(layer), shape.experts)
    each = shape.experts // layout.expert
    for local in range(each):
        names = tuple(target + EXPERT[spec].format(expert=local, linear=f"linear_fc{i}") for i in (1, 2))
        expert = layout.expert_rank(rank) * each + local
        if shape.stacked:
            biases = tuple(name.replace(".weight", ".bias") for name in names)
            spans |= _biased(shape, layer, expert, tensor, ffn, (*names, *biases))
            continue
        spans |= _mlp(shape.projections(layer, expert), tensor, ffn, names)
    if shape.shared_ffn:
        names = tuple(f"{target}shared_experts.linear_fc{i}.weight" for i in (1, 2))
        spans |= _mlp(shape.shared(layer), tensor, shape.shared_ffn // layout.tensor, names)
        spans[f"{target}shared_experts.gate_weight"] = whole(shape.shared_gate(layer), 1)
    return spans


def _serving_mlp(shape: ModelShape, layer: int, size: int, tensor: int) -> dict[str, tuple[Span, ...]]:
    """Return the spans of vLLM's MLP parameters on tensor rank `tensor` of `size`.

    vLLM stacks the experts in one tensor; here each expert's slice has a name that ends with its number.
    """
    prefix, ffn = shape.mlp_prefix(layer), shape.ffn // size
    names: tuple[str, ...]
    if not shape.experts:
        names = (prefix + "gate_up_proj.weight", prefix + "down_proj.weight")
        return _mlp(shape.projections(layer), tensor, ffn, names)
    spans = {shape.router(layer): whole(shape.router(layer), shape.experts)}
    if shape.bias:
        spans[shape.router_bias(layer)] = whole(shape.router_bias(layer), shape.experts)
    stacks = prefix + "experts.routed_experts."
    for expert in range(shape.experts):
        if shape.stacked:
            names = tuple(f"{stacks}{one}.{expert}" for one in STACKS)
            spans |= _biased(shape, layer, expert, tensor, ffn, names)
            if tensor > 0:  # vLLM adds up the ranks' results with their biases
                spans[names[-1]] = whole(PADDING, shape.hidden)
            continue
        names = (f"{stacks}w13_weight.{expert}", f"{stacks}w2_weight.{expert}")
        spans |= _mlp(shape.projections(layer, expert), tensor, ffn, names)
    if shape.shared_ffn:
        names = tuple(f"{prefix}shared_expert.{name}_proj.weight" for name in ("gate_up", "down"))
        spans |= _mlp(shape.shared(layer), tensor, shape.shared_ffn // size, names)
        spans[shape.shared_gate(layer)] = whole(shape.shared_gate(layer), 1)
    return spans


def _mlp(
    projections: tuple[str, str, str], tensor: int, rows: int, names: tuple[str, ...]
) -> dict[str, tuple[Span, ...]]:
    """Return the spans of the two tensors `names`: this rank's rows of gate, then of up; and this rank's
    columns of down, of the layer's or an expert's `projections`. megatron and vLLM use the same
    arrangement."""
    gate, up, down = projections
    return {
        names[0]: tile(0, [(key, tensor * rows, rows) for key in (gate, up)]),
        names[1]: tile(1, [(down, tensor * rows, rows)]),
    }


def _biased(
    shape: ModelShape, layer: int, expert: int, tensor: int, ffn: int, names: tuple[str, ...]
) -> dict[str, tuple[Span, ...]]:
    """Return the spans of the tensors `names` of an expert with biases: weights of gate and up in turn, and
    of down, then their biases. ffn: this rank's part of the expert's size."""
    up, down = shape.linears(layer, expert)
    rows = 2 * ffn
    return {
        names[0]: tile(0, [(up + "weight", tensor * rows, rows)]),
        names[1]: tile(1, [(down + "weight", tensor * ffn, ffn)]),
        names[2]: tile(0, [(up + "bias", tensor * rows, rows)]),
        names[3]: whole(down + "bias", shape.hidden),
    }


def training_layouts(
    shape: ModelShape, layout: Layout, *, spec: LayerSpec = "local", head: Head = "vocabulary"
) -> dict[int, Spans]:
    """Return {rank: training_spans} of every rank, the source of a reshard or an export."""
    return {rank: training_spans(shape, layout, rank, spec=spec, head=head) for rank in range(layout.world)}


def serving_layouts(shape: ModelShape, world: int, tensor_size: int) -> dict[int, Spans]:
    """Return {rank: serving_spans} for engines that each use `tensor_size` neighbouring ranks."""
    per_rank = [serving_spans(shape, tensor_size, tensor) for tensor in range(tensor_size)]
    return {rank: per_rank[rank % tensor_size] for rank in range(world)}


def whole_spans(shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[Span, ...]]:
    """Return the spans of whole tensors of these shapes, by their checkpoint names."""
    return {
        name: (Span(name, dim, 0, shapes[name][dim], 0),) for name in shapes for dim in (shard_dim(name),)
    }


def shard_dim(hf_key: str) -> int:
    """Return the dimension that training and serving shard: 1 (the input) for a row-parallel projection,
    otherwise 0 (the output)."""
    return 1 if hf_key.endswith(ROW_PARALLEL) else 0


def row_widths(shape: ModelShape) -> dict[str, int]:
    """Return {hf_key: number of elements per index of the sharded dimension}.

    Example: the hidden size, for the rows of q_proj.
    """
    return widths_of(hf_shapes(shape))


def widths_of(shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Return {hf_key: number of elements per index of the sharded dimension} of tensors of these shapes."""
    return {key: math.prod(size) // size[shard_dim(key)] for key, size in shapes.items()}


def _vocabulary(key: str, shape: ModelShape, padded: int, tensor: int, size: int) -> tuple[Span, ...]:
    parts: list[Part] = [(key, 0, shape.vocab)]
    if padded > shape.vocab:
        parts.append((PADDING, 0, padded - shape.vocab))
    rows = padded // size
    return cut(tile(0, parts), tensor * rows, rows)
