"""Describes a tensor as a tuple of spans that tile it along one dimension, with functions to make them; and
where a tensor is in a file."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

PADDING = ""  # the hf_key of padding rows, which are zero, exist on one side only and are never sent


class Span(NamedTuple):
    """Rows (columns, if dim is 1) [local, local + size) of a tensor are [start, start + size) of `hf_key`.

    Example: Span("model.layers.0.mlp.up_proj.weight", 0, 32, 16, 16) in a rank's linear_fc1 means that its
    rows 16..31 are rows 32..47 of the checkpoint's up projection.
    """

    hf_key: str
    dim: int
    start: int
    size: int
    local: int


Spans = Mapping[str, tuple[Span, ...]]  # {tensor name: its spans}
Part = tuple[str, int, int]  # hf_key, first row, number of rows


def whole(hf_key: str, size: int) -> tuple[Span, ...]:
    """Return the span of a tensor that holds all `size` rows of `hf_key`."""
    return (Span(hf_key, 0, 0, size, 0),)


def tile(dim: int, parts: list[Part]) -> tuple[Span, ...]:
    """Return the spans of parts that are placed one after another, from local position 0."""
    spans, local = [], 0
    for key, start, size in parts:
        spans.append(Span(key, dim, start, size, local))
        local += size
    return tuple(spans)


def cut(spans: tuple[Span, ...], first: int, size: int) -> tuple[Span, ...]:
    """Return the parts of the spans in local positions [first, first + size), with positions relative to
    `first`."""
    out = []
    for key, dim, start, length, local in spans:
        begin, end = max(first, local), min(first + size, local + length)
        if begin < end:
            shift = begin - local
            out.append(Span(key, dim, 0 if key == PADDING else start + shift, end - begin, begin - first))
    return tuple(out)


class Entry(NamedTuple):
    """A tensor, which is the whole or a part of a file's tensor `key`.

    Example: Entry(Path("model.safetensors"), "BF16", (512, 2048), "model.layers.0.mlp.experts.gate_up_proj",
    (3, 512)) has the rows 512..1023 of the fourth expert's matrix.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    key: str
    part: tuple[int, int] | None = None  # index of the expert, and the first of its rows; None: the whole
    transposed: bool = False  # the file's tensor has the expert's columns before its rows
