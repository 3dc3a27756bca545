"""Shared code of the reshard tests: random checkpoints, their shards, and a simple execution of a plan."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from megatron_stppo.weights.reshard.plan import RowCopy, plan_copies
from megatron_stppo.weights.sharding.hf_names import ModelShape, families, hf_shapes
from megatron_stppo.weights.sharding.tiles import PADDING, Spans


def model_shape(**changes) -> ModelShape:
    """Return the shape of a small Qwen3: 4 layers, hidden 8, 4 heads of 2, 2 KV heads, ffn 12, 300 tokens."""
    sizes = {"layers": 4, "hidden": 8, "heads": 4, "kv_heads": 2, "head_dim": 2, "ffn": 12, "vocab": 300}
    rest = {"family": "qwen3", "tied": False, "rope_theta": 1e4, "norm_eps": 1e-6, "max_positions": 64}
    given = sizes | rest | changes
    return families()[given["family"]](**given)


def checkpoint(shape: ModelShape, dtype=torch.float32) -> dict[str, Tensor]:
    """Return a checkpoint in which every element has a different value."""
    held, first = {}, 0
    for key, dims in hf_shapes(shape).items():
        size = torch.Size(dims).numel()
        held[key] = (torch.arange(size, dtype=torch.int32) + first).view(dims).to(dtype)
        first += size
    return held


def local_shape(spans, widths, name="") -> tuple[int, ...]:
    last = spans[-1]
    rows = last.local + last.size
    keys = [span.hf_key for span in spans if span.hf_key != PADDING]
    width = widths[keys[0]] if keys else widths["model.embed_tokens.weight"]
    if ".w2_bias." in name:
        return (rows,)
    if keys and keys[0].endswith((".bias", "norm.weight", "A_log", "dt_bias", "sinks")):
        return (rows,)
    if keys and keys[0].endswith("conv1d.weight"):
        return (rows, 1, width)
    return (rows, width) if last.dim == 0 else (width, rows)


def blank(spans: Spans, widths, dtype=torch.float32) -> dict[str, Tensor]:
    """Return tensors with a rank's shapes and the value -1."""
    return {n: torch.full(local_shape(s, widths, n), -1, dtype=dtype) for n, s in spans.items()}


def cut(spans: Spans, held, widths, dtype=torch.float32) -> dict[str, Tensor]:
    """Return a rank's tensors, sliced from a checkpoint by its spans; padding has the value 77."""
    out = {n: torch.full(local_shape(s, widths, n), 77, dtype=dtype) for n, s in spans.items()}
    for name, tensor_spans in spans.items():
        for key, dim, start, size, local in tensor_spans:
            if key != PADDING:
                out[name].narrow(dim, local, size).copy_(held[key].narrow(dim, start, size))
    return out


def build_plan(*layouts: Any, **settings: Any) -> list[RowCopy]:
    return list(plan_copies(*layouts, **settings))


def apply(
    copies: Iterable[RowCopy], sources: dict[int, dict[str, Tensor]], targets: dict[int, dict[str, Tensor]]
) -> None:
    """Execute the copies of a plan one after another. Every target element may be written once."""
    for c in copies:
        into = targets[c.target_rank][c.target].narrow(c.dim, c.target_offset, c.size)
        assert (into == -1).all(), f"{c} overwrites the target of another copy"
        into.copy_(sources[c.source_rank][c.source].narrow(c.dim, c.source_offset, c.size))


def padding_rows(spans: Spans, tensors: dict[str, Tensor]) -> list[Tensor]:
    return [
        tensors[name].narrow(span.dim, span.local, span.size)
        for name, tensor_spans in spans.items()
        for span in tensor_spans
        if span.hf_key == PADDING
    ]
