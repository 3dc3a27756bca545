"""Checks that a step of actor and critic does not depend on how it is computed.

The run's own layout computes it with micro-batches of a few trajectories, one and all, in the opposite order
and without shared prefixes. A few other layouts follow (`few` in layouts/cases.py); `check-layouts` has all.
"""

from collections.abc import Iterator
from functools import partial

from megatron_stppo.cluster.launch import process
from megatron_stppo.config import Config
from megatron_stppo.evidence.bench.stage import Checked, Stage, faultless
from megatron_stppo.evidence.layouts.cases import few
from megatron_stppo.evidence.layouts.comparison import TOLERANCES, compared
from megatron_stppo.parallel import groups
from megatron_stppo.parallel.collectives import broadcast_bytes, decode, encode
from megatron_stppo.weights.sharding.hf_names import ModelShape

LAYOUTS = "the loss does not depend on the layout"


def layouts(stage: Stage) -> Iterator[Checked]:
    """Compare the same step under several layouts. Collective.

    It replaces the process groups, so that the run's models cannot be used afterwards: the last check.
    """
    shape, world = stage.learner.shape, stage.learner.mesh.world
    stage.drop_models()
    yield finding(stage.config, shape, world)
    groups.replace(stage.config.parallel, stage.config.timeout)


def finding(config: Config, shape: ModelShape, world: int) -> Checked:
    """Return the line of all cases. Collective; the process groups are those of the last case."""
    rows = list(compared(config, shape, partial(few, shape, world, config.parallel)))
    limits = TOLERANCES[process.dtype(config)]
    apart = [(name, size) for row in rows for name, size in row.apart.items()]
    largest = max(size / limits.get(name, limits["number"]) for name, size in apart)
    measured = f"{len(rows)} cases, largest difference {largest:.2g} of what is allowed"
    wrong = [f"{row.case} ({row.named('weights of {}')})" for row in rows if row.broken]
    if wrong:
        wrong[0] = f"{len(wrong)} of {len(rows)} cases differ from {rows[0].case!r}: {wrong[0]}"
    wrong, measured = decode(broadcast_bytes(encode((wrong, measured)), 0), tuple[list[str], str])
    return faultless(
        LAYOUTS,
        wrong,  # other ranks have no weights
        measured,
        "parallel, update.tokens_per_microbatch: `megatron-stppo check-layouts` shows which layouts and "
        "sizes differ; use those that agree",
    )
