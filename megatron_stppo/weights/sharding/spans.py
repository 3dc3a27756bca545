"""Describes where the rows of a checkpoint are: on a training rank, on a serving rank, in the checkpoint.

The functions here do not move or convert weights. The resharding into the engine, the import and the export
use these three descriptions.
"""

import math
from collections.abc import Mapping, Sequence

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
from megatron_stppo.weights.sharding.parts import JOINED, LayerSpec, TrainingRank
from megatron_stppo.weights.sharding.tiles import PADDING, Part, Span, Spans, cut, tile, whole

STACKS = ("w13_weight", "w2_weight", "w13_bias", "w2_bias")  # vLLM's tensors of all experts of a layer


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
    padded, spans, place = shape.padded_vocab(layout.tensor), {}, TrainingRank(layout, rank, spec)
    for chunk, layers in enumerate(layout.chunks(shape.layers, stage)):
        prefix = chunk_prefix(layout.virtual, chunk)
        if stage == chunk == 0:
            spans[prefix + "embedding.word_embeddings.weight"] = _vocabulary(
                EMBEDDING, shape, padded, tensor, layout.tensor
            )
        for local, layer in enumerate(layers):
            spans |= _training_layer(shape, layer, f"{prefix}decoder.layers.{local}.", place)
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


def _training_layer(
    shape: ModelShape, layer: int, target: str, at: TrainingRank
) -> dict[str, tuple[Span, ...]]:
    """Return the spans of a layer, whose names in megatron begin with `target`."""
    source, of_mixer, of_mlp = shape.prefixes(layer)
    mixer, norms = shape.mixer(layer), {key: f"{module}.weight" for key, module in shape.norms.items()}
    if at.spec == "transformer_engine":
        joined = JOINED.items() if not shape.experts else [*JOINED.items()][:1]
        norms = {key: dict(joined).get(name, name) for key, name in norms.items()}
    return {
        **mixer.training_spans(of_mixer, target + "self_attention.", at),
        **{target + name: whole(f"{source}{key}.weight", shape.hidden) for key, name in norms.items()},
        **shape.mlp.training_spans(of_mlp, target + "mlp.", at),
    }


def serving_spans(shape: ModelShape, tensor_size: int, tensor: int) -> dict[str, tuple[Span, ...]]:
    """Return the spans of the engine's parameters (vLLM's modules) on tensor rank `tensor` of `tensor_size`.

    vLLM pads the vocabulary to a multiple of 64. A tied model has no lm_head parameter.
    """
    padded = -(-shape.vocab // 64) * 64
    spans = {EMBEDDING: _vocabulary(EMBEDDING, shape, padded, tensor, tensor_size)}
    if not shape.tied:
        spans[HEAD] = _vocabulary(HEAD, shape, padded, tensor, tensor_size)
    spans[NORM] = whole(NORM, shape.hidden)
    for layer in range(shape.layers):
        prefix, of_mixer, of_mlp = shape.prefixes(layer)
        spans |= shape.mixer(layer).serving_spans(of_mixer, tensor_size, tensor)
        spans |= shape.mlp.serving_spans(of_mlp, tensor_size, tensor)
        norms = [f"{prefix}{norm}.weight" for norm in shape.norms]
        spans |= {norm: whole(norm, shape.hidden) for norm in norms}
    return {_served(shape, name): of for name, of in spans.items()}


def _served(shape: ModelShape, name: str) -> str:
    for part, other in shape.served.items():
        name = name.replace(part, other)
    return name


def training_layouts(
    shape: ModelShape, layout: Layout, *, spec: LayerSpec = "local", head: Head = "vocabulary"
) -> dict[int, Spans]:
    """Return {rank: training_spans} of every rank, the source of a reshard or an export."""
    return {rank: training_spans(shape, layout, rank, spec=spec, head=head) for rank in range(layout.world)}


def serving_layouts(shape: ModelShape, world: int, tensor_size: int) -> dict[int, Spans]:
    """Return {rank: serving_spans} for engines that each use `tensor_size` neighbouring ranks."""
    per_rank = [serving_spans(shape, tensor_size, tensor) for tensor in range(tensor_size)]
    return {rank: per_rank[rank % tensor_size] for rank in range(world)}


def whole_spans(shape: ModelShape, shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[Span, ...]]:
    """Return the spans of whole tensors of these shapes, by their checkpoint names."""
    dims = {name: shard_dim(shape, name) for name in shapes}
    return {name: (Span(name, dim, 0, shapes[name][dim], 0),) for name, dim in dims.items()}


def shard_dim(shape: ModelShape, hf_key: str) -> int:
    """Return the dimension that training and serving shard: 1 (the input) for a row-parallel projection,
    otherwise 0 (the output)."""
    return 1 if hf_key.endswith(shape.row_parallel) else 0


def row_widths(shape: ModelShape) -> dict[str, int]:
    """Return {hf_key: number of elements per index of the sharded dimension}.

    Example: the hidden size, for the rows of q_proj.
    """
    return widths_of(shape, hf_shapes(shape))


def widths_of(shape: ModelShape, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Return {hf_key: number of elements per index of the sharded dimension} of tensors of these shapes."""
    return {key: math.prod(size) // size[shard_dim(shape, key)] for key, size in shapes.items()}


def _vocabulary(key: str, shape: ModelShape, padded: int, tensor: int, size: int) -> tuple[Span, ...]:
    parts: list[Part] = [(key, 0, shape.vocab)]
    if padded > shape.vocab:
        parts.append((PADDING, 0, padded - shape.vocab))
    rows = padded // size
    return cut(tile(0, parts), tensor * rows, rows)
