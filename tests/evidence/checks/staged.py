"""A stage on one rank, and the lines of a check's findings with a fault planted in the program.

The project is that of `megatron-stppo init`, whose model has bytes as tokens: half of its random turns are no
text, so that a turn which is decoded and encoded again has other tokens.
"""

from __future__ import annotations

import copy
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_stppo.commands.environments import write_project
from megatron_stppo.config.file import load
from megatron_stppo.evidence.bench.stage import Stage
from megatron_stppo.evidence.verification import Check
from megatron_stppo.replicas.trainer import start
from megatron_stppo.training import colocated
from tests.evidence.checks import test_formulas
from tests.ranks import leave_group

Patch = Callable[[pytest.MonkeyPatch], None]
OVERRIDES = [
    "rollout.kv_cache_gib=0.05",
    "environment.max_turns=3",
    "run.name=verify",
    "update.actor.warmup_fraction=0.5",
]


def write(folder: Path) -> Path:
    """Write the project and its model. Return the configuration's path."""
    write_project(folder)
    with chdir(folder):
        runpy.run_path("make_model.py")
    return folder / "config.yaml"


def mistaken(where: str, line: str, mistake: str) -> Patch:
    """Return a plant that changes a line of a function."""
    return lambda mp: test_formulas.mistake(mp, where, line, mistake)


def open_stage(path: Path, *overrides: str) -> Stage:
    """Build the stage of a project. To be called on the only rank of run_ranks."""
    leave_group()
    os.chdir(path.parent)  # model.path is relative
    sys.path.insert(0, str(path.parent))
    config = load(path, [*OVERRIDES, *overrides, f"run.root={path.parent / 'runs'}"]).beside(path.parent)
    assemble = start.assemble if config.serving.replicas else colocated.assemble
    return Stage.of(config, assemble(config, False))


def with_section(stage: Stage, section: str, **given: Any) -> Stage:
    """Return the stage, with the same episodes, and these settings in a section."""
    other = copy.copy(stage)
    changed = getattr(stage.config, section).model_copy(update=given)
    other.config = stage.config.model_copy(update={section: changed})
    return other


def findings(
    stage: Stage, check: Check, plants: Mapping[str, Patch], again: bool = True
) -> dict[str, list[str]]:
    """Return the lines of the failed findings of a check for each plant, and without one ("").

    again: play the episodes again under the plant.
    """

    def lines(patch: Patch) -> Iterator[str]:
        with pytest.MonkeyPatch.context() as mp:
            patch(mp)
            if again:
                stage.rollouts.publish(stage.version)  # so that the engine is awake
            planted = replace(stage) if again else stage
            planted.rollouts.load_for("score")
            yield from (f"{one.check}: {one.measured}" for one in check(planted) if one.verdict == "fails")
            stage.version = planted.version

    nothing: dict[str, Any] = {"": lambda mp: None}
    return {name: list(lines(patch)) for name, patch in (nothing | dict(plants)).items()}


def run(of: Callable[[Stage], Any], path: Path, *overrides: str) -> Any:
    """Return of(stage). To be called on the only rank of run_ranks."""
    stage = open_stage(path, *overrides)
    try:
        return of(stage)
    finally:
        stage.rollouts.close()
