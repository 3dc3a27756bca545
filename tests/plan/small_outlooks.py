"""Functions that run in the planner's process."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

from tests.plan.real_step import settings


def outlook(folder: str, gpus: int, trainers: tuple[int, ...], assume: tuple[str, ...] = ()) -> Any:
    """Return the gain of the small run, the verdict, and what is printed."""
    from megatron_stppo.plan import assumptions
    from megatron_stppo.plan.outlook import Planner
    from megatron_stppo.plan.report import verdict, write_outlooks
    from megatron_stppo.plan.simulation.workload import Workload

    config = settings(folder, {"dtype": "auto"}, {})
    given = assumptions.read(config, assume)
    work = Workload(assumptions.lengths(config, given), assumptions.tools(config, given))
    planner, text = Planner(config, work, given), io.StringIO()
    found = planner.outlook(gpus, trainers, (), "")
    with contextlib.redirect_stdout(text):
        write_outlooks(planner, [found], None, in_json=False)
    return {"gain": found.gain, "verdict": list(verdict(found)), "printed": text.getvalue()}


def trainer_seconds(folder: str) -> tuple[float, float]:
    """Return the seconds for a batch of full episodes at the peak rate, and those of the plan's bounds."""
    from megatron_stppo.plan import assumptions
    from megatron_stppo.plan.assumptions import H100
    from megatron_stppo.plan.dry_run import plan, training_use
    from megatron_stppo.plan.times import trainer_speed
    from megatron_stppo.weights.sharding.hf_names import read_shape

    config = settings(folder, {"dtype": "auto"}, {})
    given = assumptions.read(config, ()) | {"training_share": 1.0}
    use = training_use(config, read_shape(config.model.path), 2)
    bounds = plan(config, 2).bounds
    speed = trainer_speed(use, config.max_context, H100, given)
    return speed.seconds(bounds.tokens), bounds.score + bounds.update


def recorded(folder: Path) -> Any:
    from megatron_stppo.plan.outlook import recorded_lengths

    return recorded_lengths(folder).records
