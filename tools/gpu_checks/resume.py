"""Check that saved checkpoints and adapters of the small model are loaded again bit for bit."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gpu_checks import main
from gpu_checks.model import SMALL, configuration, trajectories
from gpu_checks.training import small_model, work
from megatron_stppo.base.types import Batch, Trajectory
from megatron_stppo.cluster.launch import process
from megatron_stppo.config import Config

if TYPE_CHECKING:
    from megatron_stppo.model.learner import Learner
    from megatron_stppo.model.optimizer import Trainer


def resident() -> dict[str, Any]:
    """Save in the background and load into a new learner; all models stay on the device."""
    process.prepare(engine=False)
    return _saved_and_loaded("resident", "none")


def offloaded() -> dict[str, Any]:
    """Do the same with everything in host memory that a phase does not need."""
    process.prepare(engine=False)
    return _saved_and_loaded("offloaded", "all")


def one_trunk() -> dict[str, Any]:
    """Score with fresh adapters, which add 0: on the shared trunk, actor and reference must be equal."""
    process.prepare(engine=False)
    config = configuration(
        small_model(),
        model={"dtype": "bfloat16", "lora": {"rank": 8}},
        update={"old_logprob": "score"},
    )
    _, batch = _scored(config)
    apart = float((batch.old_logprob_T - batch.reference_logprob_T).abs().max())
    if apart != 0:
        raise AssertionError(f"fresh adapters add 0, but actor and reference differ by {apart} nats")
    return {"tokens": len(batch.old_logprob_T), "difference of log-probs, nats": apart}


def _saved_and_loaded(name: str, offload: str) -> dict[str, Any]:
    from megatron_stppo.checkpoint.saving import Saver
    from megatron_stppo.data.packing import groups_of
    from megatron_stppo.model.learner import build_learner
    from megatron_stppo.training.advantage import estimate
    from megatron_stppo.training.stages import update

    config = configuration(
        small_model(),
        model={"dtype": "bfloat16"},
        update={"old_logprob": "score", "offload": offload},
    )
    learner, batch = _scored(config)
    batch = estimate(batch, config.algorithm, groups_of([t.summary for t in _played()]))
    learner.load_for("update")
    update(learner, batch, 0)
    learner.load_for("checkpoint")
    saver = Saver(work() / f"checkpoints-{name}", config, learner.mesh.layout)
    start = time.perf_counter()
    saver.save(1, learner.trainers, {"iteration": 1})
    waited = time.perf_counter() - start
    expected = _contents(learner.trainers)
    learner.load_for("update")
    update(learner, batch, 1)  # while the files are written
    saver.finish()
    other = build_learner(config, learner.shape, learner.mesh, process.dtype(config))
    saver.load(other.trainers)
    found = _contents(other.trainers)
    apart = [key for key, x in expected.items() if not torch.equal(x, found[key])]
    changed = sum(not torch.equal(x, expected[key]) for key, x in _contents(learner.trainers).items())
    if apart or not changed:
        raise AssertionError(
            f"{len(apart)} tensors differ after loading, {changed} after the next update: {apart[:5]}"
        )
    return {"tensors": len(found), "MiB": _mib(found), "seconds that training waits": waited}


def _contents(trainers: Mapping[str, Trainer]) -> dict[str, Tensor]:
    """Return copies of weights, float32 weights and moments on the host, by role, number and name."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    from megatron_stppo.checkpoint.contents import saved_tensors

    return {
        f"{role} {number} {piece.key}": piece.data.to("cpu", copy=True)
        for role, trainer in trainers.items()
        for number, piece in enumerate(nested_values(saved_tensors(trainer, is_loading=False)))
        if isinstance(piece.data, Tensor)
    }


def _mib(tensors: Mapping[str, Tensor]) -> float:
    return sum(x.nbytes for x in tensors.values()) / 2**20


def _played() -> list[Trajectory]:
    return trajectories(SMALL["vocab"], [60, 90, 120, 150, 80, 110, 70, 140])


def _scored(config: Config) -> tuple[Learner, Batch]:
    """Return a learner and a batch of random trajectories with the log-probs of its models."""
    from megatron_stppo.data.packing import to_batch
    from megatron_stppo.model.learner import build_learner
    from megatron_stppo.training.stages import divided, score
    from megatron_stppo.weights.sharding.hf_names import read_shape

    mesh, shape = process.start(config), read_shape(config.model.path)
    learner = build_learner(config, shape, mesh, process.dtype(config))
    learner.load_for("score")
    return learner, score(learner, divided(learner, to_batch(_played()), 0))


if __name__ == "__main__":
    main(resident, offloaded, one_trunk)
