"""Checkpoints of adapters: which weights they belong to. Those weights are not in the checkpoint.

A checkpoint of adapters holds A and B, a critic's head and the optimizer states of these. It has a digest of
the frozen weights, which are read from model.path again, and one of the reference's adapters, which are read
from model.lora.path again. Both are taken when a run builds its models: a save reads neither folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_stppo.config import ConfigError
from megatron_stppo.model.token_model import TokenModel
from megatron_stppo.sharding.weights_digest import weights_digest


def adaptation_of(model: Sequence[TokenModel]) -> dict[str, Any] | None:
    """Return what a checkpoint records of a model's adapters, or None if all weights are trained.

    Collective. The first call for a folder of frozen weights reads all of them, divided among the ranks; in a
    run, learner.py has made it.
    """
    found = model[0].adaptation
    if found is None:
        return None
    settings = {"rank": found.rank, "alpha": found.alpha, "targets": sorted(found.targets)}
    return settings | {"trunk": weights_digest(found.folder, found.shape), "initial": found.initial}


def check_adaptation(
    path: Path, written: dict[str, Any] | None, model: Sequence[TokenModel], *, resumes: bool
) -> None:
    """Raise ConfigError unless the checkpoint `path`, which recorded `written`, fits the model.

    resumes: whether the run continues. It then needs the reference that it began with, which has the initial
    adapters. Collective.
    """
    here, remedy = adaptation_of(model), "set model.lora as its run had it, or give another run.name"
    if written is None or here is None:
        if written is not here:
            ranks = [found["rank"] if found else 0 for found in (written, here)]
            raise ConfigError(
                f"{path}: was written with model.lora.rank={ranks[0]}, this run has {ranks[1]}; {remedy}"
            )
        return
    for name in ("rank", "alpha", "targets"):
        if written.get(name) != here[name]:
            raise ConfigError(
                f"{path}: was written with model.lora.{name}={written.get(name)}, this run has {here[name]}; "
                f"{remedy}"
            )
    if written.get("trunk") != here["trunk"]:
        raise ConfigError(
            f"{path}: its adapters belong to other weights than those of model.path; give the model that its "
            "run began with, or another run.name"
        )
    if resumes and written.get("initial") != here["initial"]:
        raise ConfigError(
            f"{path}: its run began with other adapters than those of this run's model.lora.path; give those "
            "that it began with (model.lora.path=null if there were none), or another run.name"
        )
