"""Check that saved checkpoints and adapters of the small model are loaded again bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from torch import Tensor

from megatron_stppo.base.types import Batch, Trajectory
from megatron_stppo.checkpoint.contents import saved_tensors
from megatron_stppo.checkpoint.saving import Saver
from megatron_stppo.cluster.launch import process
from megatron_stppo.config import Config
from megatron_stppo.data.packing import groups_of, to_batch
from megatron_stppo.model.learner import Learner, build_learner
from megatron_stppo.model.optimizer import Trainer
from megatron_stppo.training.advantage import estimate
from megatron_stppo.training.stages import divided, score, update
from tools.gpu_checks.model import SMALL, configuration, learner_of, once, trajectories, work
from tools.measuring import timed


def resident() -> dict[str, Any]:
    """Save in the background and load into a new learner; all models stay on the device."""
    return _saved_and_loaded("resident", "none")


def offloaded() -> dict[str, Any]:
    """Do the same with everything in host memory that a phase does not need."""
    return _saved_and_loaded("offloaded", "all")


def one_trunk() -> dict[str, Any]:
    """Score with fresh adapters, which add 0: on the shared trunk, actor and reference must be equal."""
    config = configuration(
        once("small"),
        model={"dtype": "bfloat16", "lora": {"rank": 8}},
        update={"old_logprob": "score"},
    )
    _, batch = _scored(config)
    apart = float((batch.old_logprob_T - batch.reference_logprob_T).abs().max())
    if apart != 0:
        raise AssertionError(f"fresh adapters add 0, but actor and reference differ by {apart} nats")
    return {"tokens": len(batch.old_logprob_T), "difference of log-probs, nats": apart}


def _saved_and_loaded(name: str, offload: str) -> dict[str, Any]:

    config = configuration(
        once("small"),
        model={"dtype": "bfloat16"},
        update={"old_logprob": "score", "offload": offload},
    )
    learner, batch = _scored(config)
    batch = estimate(batch, config.algorithm, groups_of([t.summary for t in _played()]))
    learner.load_for("update")
    update(learner, batch, 0)
    learner.load_for("checkpoint")
    saver = Saver(work() / f"checkpoints-{name}", config, learner.mesh.layout)
    seconds = dict[str, float]()
    with timed(seconds, "seconds that training waits"):
        saver.save(1, learner.trainers, {"iteration": 1})
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
    size = sum(x.nbytes for x in found.values()) / 2**20
    return {"tensors": len(found), "MiB": size} | seconds


def _contents(trainers: Mapping[str, Trainer]) -> dict[str, Tensor]:
    """Return copies of weights, float32 weights and moments on the host, by role, number and name."""

    return {
        f"{role} {number} {piece.key}": piece.data.to("cpu", copy=True)
        for role, trainer in trainers.items()
        for number, piece in enumerate(nested_values(saved_tensors(trainer, is_loading=False)))
        if isinstance(piece.data, Tensor)
    }


def _played() -> list[Trajectory]:
    return trajectories(SMALL["vocab"], [60, 90, 120, 150, 80, 110, 70, 140])


def _scored(config: Config) -> tuple[Learner, Batch]:
    """Return a learner and a batch of random trajectories with the log-probs of its models."""
    learner = learner_of(config)
    learner.load_for("score")
    return learner, score(learner, divided(learner, to_batch(_played()), 0))
