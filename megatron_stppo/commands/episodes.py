"""The commands `rollout` and `evaluate`, which play episodes and train nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_stppo.cluster.exits import naming_a_full_disk
from megatron_stppo.cluster.launch import process
from megatron_stppo.commands.open_run import importing, lock, open_config
from megatron_stppo.commands.options import File, Modules, Overrides, command_group, examples

commands = command_group()


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
        from megatron_stppo.training.play import play
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
    from megatron_stppo.validation import checks

    checks.check_step(settings.run.folder, "checkpoint", checkpoint)
    if output is not None:
        checks.check_folder("--output", output.parent)
    with importing():
        process.prepare()
        from megatron_stppo.training import evaluate as stage
    with naming_a_full_disk(settings.run.folder):
        stage.evaluate(settings, checkpoint, output)
