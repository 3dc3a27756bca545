"""Checks that a step of actor and critic does not depend on how it is computed.

The run's own layout computes it with micro-batches of a few trajectories, one and all, in the opposite order
and without shared prefixes. At most OTHERS other layouts follow, those without data parallelism and with as
much of it as possible first, but none whose ranks hold more than twice as many weights. `check-layouts` has
all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron_stppo.cluster.launch import process
from megatron_stppo.config import Config, ParallelConfig
from megatron_stppo.evidence.layouts.cases import Case, cases
from megatron_stppo.evidence.layouts.check import TOLERANCES, compared
from megatron_stppo.evidence.verify.stage import Checked, Stage, judged
from megatron_stppo.parallel import groups
from megatron_stppo.parallel.collectives import broadcast_record
from megatron_stppo.parallel.layout import Layout
from megatron_stppo.weights.sharding.hf_names import ModelShape

LAYOUTS = "the loss does not depend on the layout"
OTHERS = 3  # layouts besides the run's own


@dataclass(frozen=True)
class Seen:
    """What the first rank has found."""

    holds: bool = True
    measured: str = ""


def layouts(stage: Stage) -> Iterator[Checked]:
    """Compare the same step under several layouts. Collective.

    It replaces the process groups, so that the run's models cannot be used afterwards: the last check.
    """
    stage.rollouts.load_for("score")  # the engine releases its memory
    shape, world = stage.learner.shape, stage.learner.mesh.world
    stage.drop_models()
    yield compared_layouts(stage.config, shape, world)
    groups.replace(stage.config.parallel, stage.config.timeout)


def compared_layouts(config: Config, shape: ModelShape, world: int) -> Checked:
    """Return the line of all cases. Collective; the process groups are those of the last case."""
    rows = list(compared(config, shape, partial(few, shape, world, config.parallel)))
    limit, broken = TOLERANCES[process.dtype(config)], [row for row in rows if row["broken"]]
    bounds = {"logprob": limit.logprob, "weights": limit.weights}
    apart = (one for row in rows for one in row["apart"].items())
    largest = max(size / bounds.get(name, limit.number) for name, size in apart)
    measured = f"{len(rows)} cases, largest difference {largest:.2g} of what is allowed"
    if broken:
        measured = f"{len(broken)} of {len(rows)} cases differ from {rows[0]['case']!r}: {_text(broken[0])}"
    seen = broadcast_record(Seen(not broken, measured), Seen, source=0)  # the other ranks have no weights
    assert seen is not None
    return judged(
        LAYOUTS,
        seen.holds,
        seen.measured,
        "parallel, update.tokens_per_microbatch: `megatron-stppo check-layouts` shows which layouts and "
        "sizes differ; use those that agree",
    )


def few(shape: ModelShape, world: int, given: ParallelConfig, budgets: list[int]) -> list[Case]:
    """Return the cases of the run's own layout, and at most OTHERS others."""
    every = cases(shape, world, given, budgets)
    fit = [case for case in every if 2 * _shards(case.parallel) >= _shards(given)]
    others = sorted(
        {case.parallel.model_dump_json(): case for case in fit if case.parallel != given}.values(),
        key=lambda case: Layout.of_world(world, case.parallel).data,
    )
    chosen = {id(case): case for case in [*others[:1], *others[::-1][: OTHERS - 1]]}
    return [case for case in every if case.parallel == given] + list(chosen.values())


def _shards(parallel: ParallelConfig) -> int:
    return parallel.tensor * parallel.pipeline * parallel.expert


def _text(row: dict[str, Any]) -> str:
    names = [f"weights of {row['tensor']}" if name == "weights" else name for name in row["broken"]]
    return f"{row['case']} ({', '.join(names)})"
