"""Compare megatron's models with TransformerEngine's layers, on the meta device, with the trainer's spans.

One process takes the place of one rank of each kind, as in `plan`.
"""

from __future__ import annotations

import functools
import importlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from tools.cuda_environment import models

# (ranks, section `parallel`): one rank; more tensor ranks than KV heads; stages with chunks; experts divided
LAYOUTS: tuple[tuple[int, dict[str, Any]], ...] = (
    (1, {}),
    (2, {"tensor": 2, "sequence": True}),
    (4, {"tensor": 4, "sequence": True}),
    (4, {"tensor": 2, "sequence": True, "pipeline": 2, "virtual": 2}),
)
EXPERTS = (4, {"tensor": 2, "sequence": True, "expert": 2})
META = {"use_cpu_initialization": False, "perform_initialization": False}


def checks() -> Iterator[tuple[str, Callable[[], str]]]:
    import torch  # noqa: F401 - loads libraries that TransformerEngine needs

    from megatron_stppo.cluster.launch import process

    importlib.import_module("transformer_engine.pytorch")  # before `prepare`, which hides it without a GPU
    process.prepare(engine=False, device="meta")
    with tempfile.TemporaryDirectory() as scratch:
        for family in sorted(models.FAMILIES.keys() - models.LOCAL_ONLY):
            folder = models.write_config(Path(scratch), family)
            for ranks, parallel in (*LAYOUTS, EXPERTS) if family in models.WITH_EXPERTS else LAYOUTS:
                axes = ", ".join(f"{axis} {size}" for axis, size in parallel.items() if size is not True)
                name = f"TransformerEngine {family}, {axes or 'one rank'}"
                yield name, functools.partial(compare, folder, ranks, parallel)


def compare(folder: Path, ranks: int, parallel: dict[str, Any]) -> str:
    """Build actor and critic on every kind of rank.

    Raise AssertionError if the name or the shape of a weight is not that of the spans.
    """
    from megatron_stppo.config import Config
    from megatron_stppo.parallel.layout import Layout
    from megatron_stppo.plan.work import kinds, standing_at
    from megatron_stppo.weights.reshard.plan import plan_copies
    from megatron_stppo.weights.sharding.hf_names import read_shape
    from megatron_stppo.weights.sharding.spans import row_widths, serving_layouts, training_layouts

    shape = read_shape(folder)
    config = Config.model_validate(
        {
            "model": {"path": str(folder), "layers": "transformer_engine", "dtype": "bfloat16"},
            "parallel": parallel,
            "megatron": META,
        }
    )
    layout, weights, modules = Layout.of_world(ranks, config.parallel), 0, set()
    sources = training_layouts(shape, layout, spec="transformer_engine")
    list(plan_copies(sources, serving_layouts(shape, ranks, ranks), row_widths(shape)))
    for kind in kinds(layout, sources):
        # TransformerEngine's modules refuse to be built without a GPU, even on the meta device
        gpu = mock.patch("torch.cuda.is_available", lambda: True)
        with standing_at(kind.rank, ranks, config) as mesh, gpu:
            for role in ("actor", "critic"):
                names, found = _compared(role, shape, config, mesh)
                weights, modules = weights + found, modules | names
    return f"{weights} weights; {', '.join(sorted(modules))}"


def _compared(role: Any, shape: Any, config: Any, mesh: Any) -> tuple[set[str], int]:
    """Return the names of megatron's TransformerEngine modules and the number of weights of this rank."""
    import torch

    from megatron_stppo.model import build
    from megatron_stppo.weights.reshard.resharder import mismatch
    from megatron_stppo.weights.sharding.spans import chunk_prefix, row_widths, training_spans

    chunks = build.build(role, shape, config, mesh, torch.bfloat16)
    weights = build.named_parameters(chunks)
    if role == "critic":
        last = chunk_prefix(len(chunks), len(chunks) - 1)
        for name in build.VALUE_HEAD:
            weights.pop(last + name, None)
    spans = training_spans(
        shape, mesh.layout, mesh.rank, spec="transformer_engine", head=role == "actor", tied_copy=True
    )
    problem = mismatch(role, weights, spans, row_widths(shape), all_named=True)
    assert not problem, f"rank {mesh.rank}: {problem}"
    assert all(weight.is_meta and weight.dtype == torch.bfloat16 for weight in weights.values())
    names = {type(module).__name__ for chunk in chunks for module in chunk.modules()}
    return {name for name in names if name.startswith("TE")}, len(weights)
