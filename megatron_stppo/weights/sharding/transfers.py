"""What the engine gets of a model: rows that no update changes, which are copied once, and the rows of every
version.

With adapters, the weights of the model are frozen. The engine gets the layers that have adapters merged with
them, or it gets A and B, and applies them itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from megatron_stppo.config import LoraConfig
from megatron_stppo.weights.sharding.hf_names import ModelShape
from megatron_stppo.weights.sharding.low_rank import (
    adapted,
    adapter_shapes,
    adapter_spans,
    serving_adapter_spans,
)
from megatron_stppo.weights.sharding.spans import row_widths, widths_of
from megatron_stppo.weights.sharding.tiles import Spans

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
    """What a trainer's ranks hold, and what an engine's need; see weights/reshard/plan.py."""

    sources: Layouts
    targets: Layouts
    widths: Mapping[str, int]
    changed: Collection[str] | None  # the checkpoint tensors that every version changes; None: all


def transfer(
    shape: ModelShape, training: Layouts, serving: Layouts, adapters: ServedAdapters | None
) -> Transfer:
    """Return the transfer from a trainer to an engine; without adapters, every version changes all weights.

    training, serving: training_layouts and serving_layouts of spans.py.
    """
    widths = row_widths(shape)
    if adapters is None:
        return Transfer(training, serving, widths, None)
    rank, names = adapters.rank, adapters.targets
    if not adapters.alone:
        return Transfer(training, serving, widths, adapted(shape, names).keys())
    shapes, hidden = adapter_shapes(shape, rank, names), shape.hidden
    # Ranks that share their spans share the result, see weights/reshard/plan.py.
    served = {
        id(spans): {**spans, **serving_adapter_spans(spans, rank, hidden, names)}
        for spans in {id(spans): spans for spans in serving.values()}.values()
    }
    return Transfer(
        {at: {**spans, **adapter_spans(spans, rank, hidden, names)} for at, spans in training.items()},
        {at: served[id(spans)] for at, spans in serving.items()},
        widths | widths_of(shapes),
        shapes.keys(),
    )
