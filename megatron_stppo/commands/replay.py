"""The command `replay`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from megatron_stppo.cluster.exits import naming_a_full_disk
from megatron_stppo.commands import train
from megatron_stppo.commands.open_run import importing, lock, open_config
from megatron_stppo.commands.options import Overrides, command_group, examples

if TYPE_CHECKING:
    pass

commands = command_group()
Records = Literal["rollouts", "batches", "journal"]


@commands.command(
    epilog=examples(
        "megatron-stppo replay runs/first run.name=again",
        "megatron-stppo replay runs/first run.name=again update.actor.lr=1e-5",
        "megatron-stppo replay runs/first run.name=one --records batches --start step_10 run.iterations=11",
        "megatron-stppo replay runs/first run.name=again --records journal",
    )
)
def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", show_default=False, help="the run to replay")],
    overrides: Overrides = None,
    config: Annotated[
        Path | None, typer.Option(metavar="CONFIG.yaml", help="default: config.yaml of RUN_DIR")
    ] = None,
    records: Annotated[
        Records,
        typer.Option(
            help="rollouts: score its trajectories and update; batches: update on its dumps; journal: play "
            "the episodes of an asynchronous run again, in the recorded order"
        ),
    ] = "rollouts",
    start: Annotated[
        str | None,
        typer.Option(help="checkpoint of RUN_DIR to start from, step_N or latest; default: model.path"),
    ] = None,
) -> None:
    """Train on the records of a run, and write a new run."""
    from megatron_stppo.validation import sources

    if records == "journal":
        return _repeat(run, overrides, config, start)
    settings = open_config(config or sources.config_of(run), overrides, "replay")
    from megatron_stppo.cluster.launch import process

    sources.check_replay(settings, records, run, start)
    lock(settings)
    with importing():
        process.prepare(engine=False)
        process.check(settings)
        from megatron_stppo.training.replay import replay as train_again
    with naming_a_full_disk(settings.run.folder):
        train_again(settings, records, run, start)


def _repeat(run: Path, overrides: list[str] | None, config: Path | None, start: str | None) -> None:
    """Repeat an asynchronous run from its journal. config: default: that of the run."""
    from megatron_stppo.config import ConfigError
    from megatron_stppo.replicas.trainer import recorded
    from megatron_stppo.replicas.wire import keys
    from megatron_stppo.validation import sources

    if start is not None:
        raise ConfigError(f"--start={start}: a journal is repeated from its beginning; remove --start")
    modules = None if config else keys.modules(run)
    settings = open_config(
        config or sources.config_of(run), overrides, "train", remedy="give another run.name", modules=modules
    )
    if settings.serving.replicas is None:
        raise ConfigError(
            f"RUN_DIR={run}: serving.replicas=null: the run was colocated and has no journal; give an "
            "asynchronous run, or replay --records rollouts"
        )
    train.start(settings, recorded=recorded.read(run))
