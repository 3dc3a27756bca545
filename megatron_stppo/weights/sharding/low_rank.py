"""Describes where the rows of low-rank adapters are: on a training rank, in an engine, and as tensors of a
checkpoint.

An adapter of a layer W [out, in] has A [r, in] and B [out, r]. Every Hugging Face layer has its own A and B,
under the names that the package `peft` gives them. megatron's linear_qkv and linear_fc1 join several such
layers. The spans of their adapters follow those of their weight: row i of B belongs to row i of the weight.

The engine gets the layers that have adapters merged with them, or it gets A and B, and applies them itself.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_stppo.config import LoraConfig
from megatron_stppo.weights.sharding.hf_names import ModelShape, hf_shapes
from megatron_stppo.weights.sharding.spans import row_widths, widths_of
from megatron_stppo.weights.sharding.tiles import PADDING, Span, Spans, tile, whole

A, B = "lora_A", "lora_B"
# {megatron's layer: the Hugging Face layers that it joins}; the layers of experts have other names. vLLM's
# qkv_proj and gate_up_proj join the same ones.
JOINED = {
    "self_attention.linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "self_attention.linear_proj": ("o_proj",),
    "mlp.linear_fc1": ("gate_proj", "up_proj"),
    "mlp.linear_fc2": ("down_proj",),
}


Layouts = Mapping[int, Spans]  # by rank


@dataclass(frozen=True)
class Adaptation:
    """The adapters of a model, and the weights that they belong to.

    Example: Adaptation(4, 32.0, ("q_proj", "v_proj"), Path("Qwen2.5-7B"), shape).
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]  # Hugging Face names, without all-linear
    folder: Path  # with the frozen weights
    shape: ModelShape
    initial: str | None = None  # SHA-256 of the file of the initial adapters; None: they add 0


class LowRank(NamedTuple):
    """The term scale * b @ a[first : first + r] that is added to rows of a weight.

    Example: with b = [[1], [2]], a = [[3, 4]], first 0 and scale 2, the weight's two rows get [6, 8] and
    [12, 16].
    """

    b: Tensor  # [rows of this rank, r]
    a: Tensor  # [J r, columns of this rank], for J joined layers
    first: int  # row of a
    scale: float


class Scaled(NamedTuple):
    """A factor that rows are multiplied by. An engine applies B A x with a B that contains the scale."""

    factor: float


Term = LowRank | Scaled


def adapter_names(linear: str) -> tuple[str, str]:
    """Return the parameter names of A and B in the adapter of megatron's layer `linear`."""
    return f"{linear}.adapter.a", f"{linear}.adapter.b"


def adapter_key(weight: str, matrix: str) -> str:
    """Return the checkpoint name of a matrix, A or B, of the adapter of a layer's weight.

    Example: adapter_key("x.up_proj.weight", A) is "x.up_proj.lora_A.weight".
    """
    return f"{weight.removesuffix('.weight')}.{matrix}.weight"


def adapted(shape: ModelShape, targets: Collection[str]) -> dict[str, tuple[int, int]]:
    """Return {checkpoint name of the weight: its shape} of the layers that get an adapter."""
    sizes = hf_shapes(shape).items()
    return {key: (size[0], size[1]) for key, size in sizes if _is_adapted(key, targets)}


def adapter_shapes(shape: ModelShape, rank: int, targets: Collection[str]) -> dict[str, tuple[int, int]]:
    """Return {checkpoint name: shape} of every A and B."""
    shapes: dict[str, tuple[int, int]] = {}
    for key, (rows, columns) in adapted(shape, targets).items():
        shapes |= {adapter_key(key, A): (rank, columns), adapter_key(key, B): (rows, rank)}
    return shapes


def adapter_spans(
    weights: Spans, rank: int, rows: int, targets: Collection[str]
) -> dict[str, tuple[Span, ...]]:
    """Return the spans of a rank's adapters. Rows of B of layers that are no targets are padding.

    weights: the rank's training_spans. rank: that of the adapters. rows: rows of the row-parallel layers
    o_proj and down_proj, which are the model's hidden size.
    """
    spans: dict[str, tuple[Span, ...]] = {}
    for linear, of_weight in _linears(weights):
        held = held_targets(linear, of_weight, targets)
        if not held:
            continue
        a, b = adapter_names(linear)
        if of_weight[0].dim == 0:
            spans[a] = tile(0, [(adapter_key(key, A), 0, rank) for key in held])
            spans[b] = tuple(
                span._replace(hf_key=adapter_key(span.hf_key, B) if span.hf_key in held else PADDING)
                for span in of_weight
            )
        else:
            spans[a] = tuple(span._replace(hf_key=adapter_key(span.hf_key, A)) for span in of_weight)
            spans[b] = whole(adapter_key(held[0], B), rows)
    return spans


def held_targets(linear: str, of_weight: tuple[Span, ...], targets: Collection[str]) -> tuple[str, ...]:
    """Return the checkpoint names of the targets that megatron's layer `linear` joins, in its order, whether
    or not this rank has rows of them."""
    prefix = of_weight[0].hf_key.rsplit(".", 2)[0]
    return tuple(f"{prefix}.{name}.weight" for name in JOINED[_kind(linear)] if name in targets)


def low_rank_terms(
    parameters: Mapping[str, Tensor], weights: Spans, rank: int, targets: Collection[str], scale: float
) -> dict[tuple[str, str], LowRank]:
    """Return {(name of megatron's weight, checkpoint name): the term of the rows of this layer}.

    parameters: those of a rank, by the names of adapter_spans.
    """
    terms: dict[tuple[str, str], LowRank] = {}
    for linear, of_weight in _linears(weights):
        for index, key in enumerate(held_targets(linear, of_weight, targets)):
            a, b = (parameters[name] for name in adapter_names(linear))
            terms[f"{linear}.weight", key] = LowRank(b, a, index * rank, scale)
    return terms


def scaled_terms(weights: Spans, targets: Collection[str], scale: float) -> dict[tuple[str, str], Scaled]:
    """Return {(name of B's parameter, its checkpoint name): the factor of its rows}."""
    return {
        (adapter_names(linear)[1], adapter_key(key, B)): Scaled(scale)
        for linear, of_weight in _linears(weights)
        for key in held_targets(linear, of_weight, targets)
    }


def serving_adapter_spans(weights: Spans, rank: int, rows: int, targets: Collection[str]) -> Spans:
    """Return the spans of an engine rank's adapters. Each A and B is a tensor with its checkpoint name.

    weights: the rank's serving_spans. rank, rows: as for adapter_spans. vLLM cuts A and B as the weight is
    cut: B has the weight's rows, or, if the weight is cut along its columns, A has these columns.
    """
    spans: dict[str, tuple[Span, ...]] = {}
    for of_weight in weights.values():
        for span in of_weight:
            if not _is_adapted(span.hf_key, targets):
                continue
            a, b = (adapter_key(span.hf_key, matrix) for matrix in (A, B))
            if span.dim == 0:
                spans |= {a: whole(a, rank), b: (span._replace(hf_key=b, local=0),)}
            else:
                spans |= {a: (span._replace(hf_key=a, local=0),), b: whole(b, rows)}
    return spans


@dataclass(frozen=True)
class ServedAdapters:
    """The adapters of a model, and how its engine gets them.

    Example: ServedAdapters(16, ("q_proj", "v_proj"), alone=True).
    """

    rank: int
    targets: tuple[str, ...]  # Hugging Face names, without all-linear
    alone: bool  # A and B, which the engine applies; False: weights that they are merged with


def served_adapters(lora: LoraConfig, shape: ModelShape) -> ServedAdapters | None:
    """Return the adapters that an engine serves, or None if all weights are trained."""
    if not lora.rank:
        return None
    layers = {key.split(".")[-2] for key in adapted(shape, lora.names)}
    targets = tuple(name for name in lora.names if name in layers)
    return ServedAdapters(lora.rank, targets, lora.sync == "adapter")


class Transfer(NamedTuple):
    """What a trainer's ranks hold, and what an engine's need; see weights/reshard/plan.py."""

    sources: Layouts
    targets: Layouts
    widths: Mapping[str, int]
    changed: Collection[str] | None  # the checkpoint tensors that every version changes; None: all


def transfer(
    shape: ModelShape,
    source: Layouts,
    serving: Layouts,
    adapters: ServedAdapters | None,
    from_engine: bool = False,
) -> Transfer:
    """Return the transfer from a trainer, or from an engine, to an engine; without adapters, every version
    changes all weights.

    source, serving: training_layouts, or serving_layouts of the engine, and serving_layouts of spans.py.
    """
    widths = row_widths(shape)
    if adapters is None:
        return Transfer(source, serving, widths, None)
    rank, names = adapters.rank, adapters.targets
    if not adapters.alone:
        return Transfer(source, serving, widths, adapted(shape, names).keys())
    shapes, hidden = adapter_shapes(shape, rank, names), shape.hidden

    def with_adapters(layouts: Layouts, add: Callable[..., Spans]) -> Layouts:
        # Ranks that share their spans share the result, see weights/reshard/plan.py.
        distinct = {id(spans): spans for spans in layouts.values()}
        served = {at: {**spans, **add(spans, rank, hidden, names)} for at, spans in distinct.items()}
        return {at: served[id(spans)] for at, spans in layouts.items()}

    return Transfer(
        with_adapters(source, serving_adapter_spans if from_engine else adapter_spans),
        with_adapters(serving, serving_adapter_spans),
        widths | widths_of(shape, shapes),
        shapes.keys(),
    )


@torch.no_grad()
def fill(parameter: Tensor, spans: tuple[Span, ...], values: Callable[[str], Tensor]) -> None:
    """Write this rank's rows of the tensors values(checkpoint name) into a parameter; padding stays."""
    for span in spans:
        if span.hf_key != PADDING:
            rows = values(span.hf_key).narrow(span.dim, span.start, span.size)
            parameter.narrow(span.dim, span.local, span.size).copy_(rows)


def _is_adapted(key: str, targets: Collection[str]) -> bool:
    """Return whether the checkpoint name is that of a weight with an adapter."""
    layer = key.removesuffix(".weight").rpartition(".")[2]
    return key.endswith(".weight") and layer in targets and ".experts." not in key


def _linears(weights: Spans) -> Iterator[tuple[str, tuple[Span, ...]]]:
    """Yield (megatron's layer, spans of its weight) of the layers that can have an adapter."""
    for name, of_weight in weights.items():
        linear, _, kind = name.rpartition(".")
        if kind == "weight" and _kind(linear) in JOINED:
            yield linear, of_weight


def _kind(linear: str) -> str:
    return ".".join(linear.split(".")[-2:])
