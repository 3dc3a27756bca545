"""The host waits for the GPU only where docs/notes/performance.md says so, on a stand-in for a GPU."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from tests import gpu_step
from tests.documented import rows
from tests.plan.real_step import EXPERTS, SHAPE

MODELS = {"score": 3, "update": 2}  # actor, critic and the reference, which is only scored
# {layout: (parallel, rank, data-parallel ranks)} of two ranks
LAYOUTS: dict[str, tuple[dict[str, Any], int, int]] = {
    "tensor": ({"tensor": 2, "sequence": True}, 0, 1),
    "context": ({"context": 2}, 0, 1),
    "interleaved": ({"pipeline": 2, "virtual": 2}, 1, 1),
    "experts": ({"expert": 2}, 0, 2),
    "first stage": ({"pipeline": 2}, 0, 1),
    "last stage": ({"pipeline": 2}, 1, 1),
}
STAGES = ("score", "advantage", "update", "reshard")
Waits = dict[tuple[str, str, str], int]  # {(stage, what, where): times}


@pytest.fixture(scope="module")
def gpu() -> Iterator[ProcessPoolExecutor]:
    """A process of its own, because the stand-in replaces parts of torch until the process ends."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), gpu_step.start) as alone:
        yield alone


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two folders with a config.json, but without weights: {"dense": folder, "experts": folder}."""
    found = {}
    for name, family, more in (("dense", "Qwen2", {}), ("experts", "Qwen3Moe", EXPERTS)):
        kind = "qwen2" if name == "dense" else "qwen3_moe"
        folder = tmp_path_factory.mktemp(name)
        shape = SHAPE | more | {"model_type": kind, "architectures": [f"{family}ForCausalLM"]}
        (folder / "config.json").write_text(json.dumps(shape), encoding="utf-8")
        found[name] = str(folder)
    return found


@pytest.mark.parametrize(
    "layout",
    [
        name if name in ("tensor", "experts") else pytest.param(name, marks=pytest.mark.long)
        for name in LAYOUTS
    ],
)
def test_the_host_waits_only_where_the_document_says(
    layout: str, gpu: ProcessPoolExecutor, models: dict[str, str]
) -> None:
    parallel, rank, data = LAYOUTS[layout]
    folder = models["experts" if layout == "experts" else "dense"]
    few, many = (
        gpu.submit(gpu_step.waits, folder, parallel, rank, trajectories).result() for trajectories in (4, 8)
    )
    assert tuple(few) == STAGES
    ours, of_megatron = _split(many)
    last = layout != "first stage"
    per_step = {
        key: times
        for key, times in _documented(None).items()
        if last or not key[2].startswith(("data/packing.py", "model/pipeline.py"))
    }
    assert ours == _split(few)[0] == per_step  # more microbatches do not change it
    more = 4 // gpu_step.IN_MICROBATCH // data
    before = _split(few)[1]
    each = {key: (of_megatron[key] - before.get(key, 0)) / more / MODELS[key[0]] for key in of_megatron}
    assert each == _documented(layout)


def _split(found: dict[str, Any]) -> tuple[Waits, Waits]:
    """Return what waits in our code, and in megatron's."""
    flat = {(stage, *key): times for stage, counts in found.items() for key, times in counts.items()}
    of_megatron = {key: times for key, times in flat.items() if key[2].startswith("megatron: ")}
    return {key: times for key, times in flat.items() if key not in of_megatron}, of_megatron


def _documented(layout: str | None) -> Waits:
    """Return the rows of the table of our code, or those of a layout in the table of megatron's."""
    found = {}
    for cells in rows("notes/performance.md"):
        if layout is None and len(cells) == 5 and cells[0] in STAGES:
            found[cells[0], cells[1], cells[2].strip("`")] = int(cells[3])
        elif cells[0] == layout:
            _, stages, what, where, times, _ = cells
            found.update({(stage, what, where.strip("`")): int(times) for stage in stages.split(" and ")})
    return found


def test_the_stand_in_counts_every_way_to_wait(gpu: ProcessPoolExecutor) -> None:
    assert gpu.submit(gpu_step.every_way_to_wait).result() == [
        "copy of pageable memory to the GPU",
        "copy to the GPU",
        "copy to the GPU",
        "copy to the host",
        "index on the host",
        "index with a mask",
        "item",
        "masked_select",
        "nonzero",
        "refused",
        "synchronize",
    ]
