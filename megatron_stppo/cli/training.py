"""The commands `train`, `replay`, `rollout`, `evaluate` and `cold-start`."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from megatron_stppo.cli.open_run import importing, lock, open_config
from megatron_stppo.cli.options import File, Overrides, command_group, examples
from megatron_stppo.exits import is_first_rank, naming_a_full_disk, noting_the_end

if TYPE_CHECKING:
    from megatron_stppo.config import Config
    from megatron_stppo.serving.recorded import Recorded

commands = command_group()
Records = Literal["rollouts", "batches", "journal"]
# the folder of the file, when interface/commands.py gives its configuration in another folder
Modules = Annotated[Path | None, typer.Option(hidden=True)]


@commands.command(
    epilog=examples(
        "megatron-stppo train config.yaml",
        "megatron-stppo train config.yaml run.name=second update.actor.lr=1e-5",
        "megatron-stppo train config.yaml --resume",
        "torchrun --standalone --nproc-per-node 8 -m megatron_stppo train config.yaml",
    )
)
def train(
    config: File,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option(help="continue an existing run from its newest checkpoint")] = False,
    replay: Annotated[Records | None, typer.Option(hidden=True)] = None,
    source: Annotated[Path | None, typer.Option("--from", hidden=True)] = None,
    start: Annotated[str | None, typer.Option(hidden=True)] = None,
    modules: Modules = None,
) -> None:
    """Train with reinforcement learning; one process, or one per device under torchrun or srun."""
    if replay or source or start:
        return _replay_by_flags(config, overrides, resume, replay, source, start)
    settings = open_config(config, overrides, "train", resume, modules=modules)
    _train(settings, resume)


def _train(settings: Config, resume: bool = False, recorded: Recorded | None = None) -> None:
    """Train. recorded: the asynchronous run to repeat."""
    if settings.serving.replicas is not None:
        from megatron_stppo.serving import address

        address.check(settings.serving.address, settings.serving.start, os.environ)
    lock(settings)
    from megatron_stppo.launch import process
    from megatron_stppo.resilience.preemption import PreemptionNotice
    from megatron_stppo.telemetry.console import say
    from megatron_stppo.validation import attempts, run_folder

    if resume and is_first_rank():
        attempts.say_changes(settings)
    if resume and (step := run_folder.finished(settings)) is not None:
        from megatron_stppo.serving import keys

        if is_first_rank():  # left by a trainer that was killed after its last checkpoint
            keys.remove(settings.run.folder)
        with noting_the_end(settings):
            given = f"run.iterations={settings.run.iterations}"
            done = f"{given}: step_{step} is done, so nothing was trained; give more to continue the run"
            return say(done, is_first_rank())

    # before the imports, which take long: without a handler SIGUSR1 would end the process
    notice = PreemptionNotice(settings.run.end_margin)
    with importing():
        process.prepare(engine=settings.serving.replicas is None)
        process.check(settings)
        from megatron_stppo import loop

        assemble: loop.Assemble
        if settings.serving.replicas is None:
            from megatron_stppo.worker import assemble as colocated

            assemble = colocated
        else:
            from megatron_stppo.serving.start import assemble as served

            assemble = partial(served, recorded=recorded, notice=lambda: notice.reason)
    from megatron_stppo.resilience.deadlines import Watchdog

    watchdog = Watchdog(settings.run.folder, settings.deadline_by_phase, process.rank(), process.world_size())
    with noting_the_end(settings), watchdog:
        loop.train(settings, resume, watchdog, notice, assemble)


def _repeat(run: Path, overrides: list[str] | None, config: Path | None, start: str | None) -> None:
    """Repeat an asynchronous run from its journal. config: default: that of the run."""
    from megatron_stppo.config import ConfigError
    from megatron_stppo.serving import keys, recorded
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
    _train(settings, recorded=recorded.read(run))


def _replay_by_flags(
    config: Path,
    overrides: list[str] | None,
    resume: bool,
    records: Records | None,
    source: Path | None,
    start: str | None,
) -> None:
    """Run `train --replay RECORDS --from RUN_DIR`, the old form of `replay`."""
    from megatron_stppo.config import ConfigError

    if records is None:
        raise ConfigError("--from and --start need --replay: use the command replay instead")
    if source is None:
        raise ConfigError(f"--replay {records} without --from: give the folder of the run to replay")
    if resume:
        raise ConfigError("--resume with --replay: a replay starts from --start step_N; remove --resume")
    replay(source, overrides, config, records, start)


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
    from megatron_stppo.launch import process

    sources.check_replay(settings, records, run, start)
    lock(settings)
    with importing():
        process.prepare(engine=False)
        process.check(settings)
        from megatron_stppo.commands.replay import replay as train_again
    with naming_a_full_disk(settings.run.folder):
        train_again(settings, records, run, start)


@commands.command(
    epilog=examples(
        "megatron-stppo rollout config.yaml run.name=played run.iterations=1",
        "megatron-stppo rollout config.yaml run.name=played run.iterations=21 --from runs/first",
    )
)
def rollout(
    config: File,
    overrides: Overrides = None,
    source: Annotated[
        Path | None,
        typer.Option("--from", help="run whose checkpoint is used; default: model.path"),
    ] = None,
    start: Annotated[str, typer.Option(help="checkpoint of that run, step_N or latest")] = "latest",
) -> None:
    """Play training episodes and write them to trajectories/, without training."""
    settings = open_config(config, overrides, "rollout", checkpoint=source is not None)
    from megatron_stppo.launch import process
    from megatron_stppo.validation import run_folder, sources

    if source is None:
        run_folder.check_new(settings)
    else:
        sources.check_source(settings, "--from", source, start)
        sources.check_left(settings, source, start)
    lock(settings)
    with importing():
        process.prepare()
        process.check(settings)
        from megatron_stppo.commands.rollout import play
    with naming_a_full_disk(settings.run.folder):
        play(settings, source, start)


@commands.command(
    epilog=examples(
        "megatron-stppo evaluate config.yaml",
        "megatron-stppo evaluate config.yaml --checkpoint latest --output after.json",
        "megatron-stppo evaluate config.yaml data.evaluate=other.jsonl evaluate.samples=4",
    )
)
def evaluate(
    config: File,
    overrides: Overrides = None,
    checkpoint: Annotated[str | None, typer.Option(help="step_N or latest; default: model.path")] = None,
    output: Annotated[Path | None, typer.Option(help="JSON file for the result")] = None,
    modules: Modules = None,
) -> None:
    """Measure exact match on data.evaluate; numbers and episodes go to evaluate/ in the run's folder."""
    settings = open_config(config, overrides, "evaluate", checkpoint=checkpoint is not None, modules=modules)
    from megatron_stppo.launch import process
    from megatron_stppo.validation import checks

    checks.check_checkpoint(settings, checkpoint)
    if output is not None:
        checks.check_folder("--output", output.parent)
    with importing():
        process.prepare()
        from megatron_stppo.commands import evaluate as stage
    with naming_a_full_disk(settings.run.folder):
        stage.evaluate(settings, checkpoint, output)


@commands.command(
    "cold-start",
    epilog=examples(
        "megatron-stppo cold-start config.yaml cold_start.output=runs/cold-start",
        "megatron-stppo cold-start config.yaml cold_start.output=runs/adapters model.lora.rank=16",
        "megatron-stppo train config.yaml model.lora.path=runs/adapters",
    ),
)
def cold_start(config: File, overrides: Overrides = None) -> None:
    """Teach a model the format from scripted trajectories (data.demonstrations). With model.lora only
    adapters are trained and written."""
    settings = open_config(config, overrides, "cold-start")
    from megatron_stppo.launch import process

    with importing():
        process.prepare(engine=False)
        from megatron_stppo.commands import cold_start as stage
    stage.cold_start(settings)
