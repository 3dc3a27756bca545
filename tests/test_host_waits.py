"""What the host does for the GPU, on a stand-in for one: it waits only in the places of the tables below, and
launches no more kernels than LAUNCHES.

A host that waits cannot enqueue work. An H100 waited as often in score and update.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from tests import gpu_step
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
# Our code, per step of one minibatch with actor, critic and reference. Stages of the pipeline before the last
# have neither `unpack` nor `total`. algorithm.correction=gradient and correction_probe read one more norm.
OURS: Waits = {
    # log-probs or values of each model, for advantages on the host
    ("score", "copy to the host", "data/packing.py unpack"): 3,
    # the actor's log-probs, for the statistics of the ratio, and after the last step for actor/kl_after
    ("update", "copy to the host", "data/packing.py unpack"): 2,
    # loss and clipping statistics of each model, to decide about the step
    ("update", "copy to the host", "model/pipeline.py total"): 2,
    # the gradient norm of each model, for the correction and the clipping
    ("update", "copy to the host", "model/optimizer.py Trainer._norm"): 2,
    # checksums of all copies; the engine reads the weights next
    ("reshard", "copy to the host", "weights/reshard/staging.py Checks.compare"): 1,
    ("reshard", "synchronize", "weights/reshard/resharder.py Resharder.sync"): 1,
}
BOTH, UPDATE = ("score", "update"), ("update",)
_SENT = "megatron: pipeline_parallel/p2p_communication.py P2PCommunicator._communicate"
_SHAPES = f"{_SENT}_shapes"
_ROUTED = (
    "megatron: transformer/moe/token_dispatcher.py MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize"
)
# megatron-core 0.16.1 with local layers, per micro-batch and model of four layers (two per stage)
MEGATRON: dict[str, tuple[tuple[tuple[str, ...], tuple[str, str], int], ...]] = {
    # one per layer: how many tokens each rank sends and each expert gets
    "experts": ((BOTH, ("synchronize", _ROUTED), 4),),
    "first stage": (
        (BOTH, ("copy to the GPU", _SHAPES), 1),  # the shape of what is sent
        (BOTH, ("synchronize", _SHAPES), 1),
        (BOTH, ("synchronize", _SENT), 1),  # megatron.batch_p2p_sync
        (UPDATE, ("copy to the host", _SHAPES), 1),  # the shape of the gradient that arrives
    ),
    "last stage": (
        (BOTH, ("copy to the host", _SHAPES), 1),
        (BOTH, ("synchronize", _SHAPES), 1),
        (BOTH, ("synchronize", _SENT), 1),
        (UPDATE, ("copy to the GPU", _SHAPES), 1),
    ),
}

# Operations that write memory of the GPU, per micro-batch and model of four layers with a head in chunks of
# 40 rows, rounded. The numbers only fall.
LAUNCHES = {"tensor": {"score": 138, "update": 454}, "experts": {"score": 260, "update": 662}}


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
def test_the_host_waits_only_in_these_places(
    layout: str, gpu: ProcessPoolExecutor, models: dict[str, str]
) -> None:
    parallel, rank, data = LAYOUTS[layout]
    folder = models["experts" if layout == "experts" else "dense"]
    (few, few_launches), (many, many_launches) = (
        gpu.submit(gpu_step.step, folder, parallel, rank, trajectories).result() for trajectories in (4, 8)
    )
    assert tuple(few) == STAGES
    ours, of_megatron = _split(many)
    last = layout != "first stage"
    per_step = {
        key: times
        for key, times in OURS.items()
        if last or not key[2].startswith(("data/packing.py", "model/pipeline.py"))
    }
    assert ours == _split(few)[0] == per_step  # more microbatches do not change it
    more = 4 // gpu_step.IN_MICROBATCH // data
    before = _split(few)[1]
    each = {key: (of_megatron[key] - before.get(key, 0)) / more / MODELS[key[0]] for key in of_megatron}
    assert each == _of_layout(layout)
    for stage, most in LAUNCHES.get(layout, {}).items():
        assert round((many_launches[stage] - few_launches[stage]) / more / MODELS[stage]) <= most, stage


def _of_layout(layout: str) -> Waits:
    return {(stage, *key): times for stages, key, times in MEGATRON.get(layout, ()) for stage in stages}


def _split(found: dict[str, Any]) -> tuple[Waits, Waits]:
    """Return what waits in our code, and in megatron's."""
    flat = {(stage, *key): times for stage, counts in found.items() for key, times in counts.items()}
    of_megatron = {key: times for key, times in flat.items() if key[2].startswith("megatron: ")}
    return {key: times for key, times in flat.items() if key not in of_megatron}, of_megatron


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
