"""The command `plan`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_stppo.base.errors import ConfigError
from megatron_stppo.commands.open_run import File, Overrides, command_group, examples, importing, open_config

if TYPE_CHECKING:  # --help must not import torch
    from megatron_stppo.config import Config
    from megatron_stppo.plan.work import RecordedBatch

commands = command_group()


@commands.command(
    epilog=examples(
        "megatron-stppo plan config.yaml --gpus 64",
        "megatron-stppo plan config.yaml --gpus 64 parallel.tensor=8 --json",
        "megatron-stppo plan config.yaml --gpus 64 --from runs/first",
        "megatron-stppo plan config.yaml --asynchronous --gpus 64 --gpus 256 --from runs/first",
        "megatron-stppo plan config.yaml --asynchronous --gpus 64 --assume tool_seconds=2",
    )
)
def plan(
    config: File,
    gpus: Annotated[
        list[int],
        typer.Option(
            min=1,
            help="GPUs of the run; the command itself needs none. May be repeated with --asynchronous",
        ),
    ],
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of tables")] = False,
    asynchronous: Annotated[
        bool,
        typer.Option(
            "--asynchronous",
            help="simulate asynchronous training with every split of the GPUs between training and serving, "
            "and colocated training",
        ),
    ] = False,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="run on whose trajectories shared prefixes are measured; default: sharing is not counted. "
            "--asynchronous: the lengths of episodes are those of the run too; default: assumed lengths",
        ),
    ] = None,
    assume: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="--asynchronous: replace an assumption, such as tool_seconds or tool_seconds_p99; may be "
            "repeated. The command prints all of them",
        ),
    ] = None,
) -> None:
    """Plan a run on any number of GPUs: memory, bytes of reshard and checkpoint, lower bounds of times."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # also where there is a GPU: nothing is computed
    if asynchronous:
        return _plan_asynchronous(config, overrides, gpus, source, assume or [], as_json)
    if assume:
        raise ConfigError("--assume: only plan --asynchronous uses it; add --asynchronous or remove it")
    if len(gpus) > 1:
        raise ConfigError(f"--gpus: {len(gpus)} values; give one, or add --asynchronous")
    settings = open_config(config, overrides, "plan", world=gpus[0])
    with importing(quiet=True, engine=False, device="meta"):
        from megatron_stppo.plan.dry_run import plan as dry_run
        from megatron_stppo.plan.report import write_plan

    found = dry_run(settings, gpus[0], source=None if source is None else _recorded(settings, source))
    write_plan(found, as_json)
    if found.broken:
        raise ConfigError("\n".join(found.broken))


def _recorded(config: Config, folder: Path) -> RecordedBatch:
    """Return the trajectories of a run, as the first epoch of the planned run divides them.

    Raises ConfigError."""
    from megatron_stppo.data.division import minibatches
    from megatron_stppo.plan.work import RecordedBatch, newest_batch

    count = config.update.minibatches
    batch, episodes = newest_batch(folder, config.rollout.episodes)
    if episodes < count:
        raise ConfigError(
            f"--from={folder}: its last iteration has {episodes} episodes, fewer than "
            f"update.minibatches={count}; give another run"
        )
    steps = minibatches(batch.first_N, count, config.run.seed, 0, 0)
    return RecordedBatch(folder, episodes, batch, steps)


def _plan_asynchronous(
    config: Path,
    overrides: list[str] | None,
    gpus: list[int],
    source: Path | None,
    assume: list[str],
    as_json: bool,
) -> None:
    """Print forecasts of asynchronous training. Raises ConfigError if no number of GPUs has a split."""
    from megatron_stppo.config.file import load
    from megatron_stppo.plan import assumptions
    from megatron_stppo.validation import checks

    settings = load(config, overrides)
    given = assumptions.read(settings, assume)
    candidates = {count: checks.candidates(settings, count) for count in gpus}
    with importing(quiet=True, engine=False, device="meta"):
        from megatron_stppo.plan.outlook import Planner, recorded_lengths
        from megatron_stppo.plan.report import write_outlooks
        from megatron_stppo.plan.simulation.workload import Workload

    recorded = None if source is None else recorded_lengths(source)
    lengths = recorded or assumptions.lengths(settings, given)
    planner = Planner(
        settings,
        Workload(lengths, assumptions.tools(settings, given)),
        given,
        source=None if source is None else _recorded(settings, source),
    )
    outlooks = [
        planner.outlook(count, found.trainers, found.left_out, found.refusal)
        for count, found in candidates.items()
    ]
    write_outlooks(planner, outlooks, None if source is None else str(source), as_json)
    if not any(one.splits for one in outlooks):
        lines = [line for one in outlooks for line in one.left_out]
        raise ConfigError("\n".join(["asynchronous training does not fit these GPUs", *lines]))
