"""What the engine gets of a model: rows that no update changes, which are copied once, and the rows of every
version.

With adapters, the weights of the model are frozen. The engine gets the layers that have adapters merged with
them, or it gets A and B, and applies them itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from megatron_stppo.config import LoraConfig
from megatron_stppo.weights.sharding.hf_names import ModelShape
from megatron_stppo.weights.sharding.low_rank import (
    adapted,
    adapter_shapes,
    adapter_spans,
    serving_adapter_spans,
)
from megatron_stppo.weights.sharding.spans import row_widths, widths_of
from megatron_stppo.weights.sharding.tiles import Span, Spans

Layouts = Mapping[int, Spans]  # by rank


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
    """The layouts of tensors that are copied together; see weights/reshard/plan.py."""

    sources: Layouts
    targets: Layouts
    widths: Mapping[str, int]


@dataclass(frozen=True)
class Transfers:
    """All tensors of the engine, in two groups."""

    each: Transfer  # what every version changes
    once: Transfer | None = None  # what never changes
    whole: Layouts | None = None  # of the engine's tensors, if the targets are their parts

    def targets(self, rank: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the targets of a rank, in the memory of its engine's tensors.

        Tensors that are in no layout are returned too, under their own names.
        """
        whole = (self.whole or {}).get(rank, {})
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            found |= _views(name, tensor, whole[name]) if name in whole else {name: tensor}
        return found


def transfers(
    shape: ModelShape, training: Layouts, serving: Layouts, adapters: ServedAdapters | None
) -> Transfers:
    """Return the transfers from a trainer to an engine; without adapters, every version changes all weights.

    training, serving: training_layouts and serving_layouts of spans.py.
    """
    widths = row_widths(shape)
    if adapters is None:
        return Transfers(Transfer(training, serving, widths))
    rank, names = adapters.rank, adapters.targets
    if not adapters.alone:
        changed = adapted(shape, names).keys()
        return Transfers(
            Transfer(training, _parts(serving, changed, True), widths),
            Transfer(training, _parts(serving, changed, False), widths),
            serving,
        )
    each = Transfer(
        {at: adapter_spans(spans, rank, shape.hidden, names) for at, spans in training.items()},
        _shared(serving, lambda spans: serving_adapter_spans(spans, rank, shape.hidden, names)),
        widths_of(adapter_shapes(shape, rank, names)),
    )
    return Transfers(each, Transfer(training, serving, widths))


def _parts(layouts: Layouts, changed: Collection[str], wanted: bool) -> Layouts:
    """Return the parts of all tensors, as tensors of their own: those in `changed`, or those that are not."""
    return _shared(
        layouts,
        lambda spans: {
            part: (span._replace(local=0),)
            for name, of_tensor in spans.items()
            for part, span in _named(name, of_tensor)
            if (span.hf_key in changed) is wanted
        },
    )


def _shared(layouts: Layouts, made: Callable[[Spans], Spans]) -> Layouts:
    """Return {rank: made(spans)}. Ranks that share their spans share the result (weights/reshard/plan.py)."""
    results = {id(spans): made(spans) for spans in {id(s): s for s in layouts.values()}.values()}
    return {rank: results[id(spans)] for rank, spans in layouts.items()}


def _named(name: str, spans: tuple[Span, ...]) -> list[tuple[str, Span]]:
    """Return (name of the part, span). Example: "x.qkv_proj.weight[64:96]", of rows 64 to 95."""
    return [(f"{name}[{span.local}:{span.local + span.size}]", span) for span in spans]


def _views(name: str, tensor: Tensor, spans: tuple[Span, ...]) -> dict[str, Tensor]:
    """Return the parts of a tensor. A tensor of another size than its spans' gives a part of another size."""
    parts = {}
    for part, span in _named(name, spans):
        end = None if span is spans[-1] else span.local + span.size
        parts[part] = tensor[(slice(None),) * span.dim + (slice(span.local, end),)]
    return parts
