"""The commands that play or train: `train`, `replay`, `rollout`, `evaluate` and `cold-start`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from megatron_stppo.base.errors import DoNotRestart, Ending
from megatron_stppo.base.files import replacing
from megatron_stppo.cluster.exits import is_first_rank, naming_a_full_disk
from megatron_stppo.cluster.launch import process
from megatron_stppo.cluster.preemption import PreemptionNotice
from megatron_stppo.commands.open_run import (
    File,
    Modules,
    Overrides,
    command_group,
    examples,
    importing,
    lock,
    open_config,
)
from megatron_stppo.observe.console import say

if TYPE_CHECKING:
    from megatron_stppo.config import Config
    from megatron_stppo.training.loop import Assemble

commands = command_group()
Records = Literal["rollouts", "batches"]
NOTE = "exit.json"  # in a run's folder


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
    modules: Modules = None,
) -> None:
    """Train with reinforcement learning; one process, or one per device under torchrun or srun."""
    settings = open_config(config, overrides, "train", resume, modules=modules)
    start_training(settings, resume)


@commands.command(
    epilog=examples(
        "megatron-stppo replay runs/first run.name=again",
        "megatron-stppo replay runs/first run.name=again update.actor.lr=1e-5",
        "megatron-stppo replay runs/first run.name=one --records batches --start step_10 run.iterations=11",
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
        typer.Option(help="rollouts: score its trajectories and update; batches: update on its dumps"),
    ] = "rollouts",
    start: Annotated[
        str | None,
        typer.Option(help="checkpoint of RUN_DIR to start from, step_N or latest; default: model.path"),
    ] = None,
    modules: Modules = None,
) -> None:
    """Train on the records of a run, and write a new run."""
    from megatron_stppo.validation import run_folder

    settings = open_config(config or run_folder.config_of(run), overrides, "replay", modules=modules)
    run_folder.check_replay(settings, records, run, start)
    lock(settings)
    with importing(settings, engine=False):
        from megatron_stppo.training.replay import replay as train_again
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
    modules: Modules = None,
) -> None:
    """Play training episodes and write them to trajectories/, without training."""
    settings = open_config(config, overrides, "rollout", checkpoint=source is not None, modules=modules)
    from megatron_stppo.validation import run_folder

    if source is None:
        run_folder.check_new(settings)
    else:
        run_folder.check_source(settings, "--from", source, start)
        run_folder.check_left(settings, source, start)
    lock(settings)
    with importing(settings):
        from megatron_stppo.training.play_only import rollout as play
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
    from megatron_stppo.validation import checks, run_folder

    run_folder.check_step(settings, settings.run.folder, "checkpoint", checkpoint)
    if output is not None:
        checks.check_folder("--output", output.parent)
    with importing():
        from megatron_stppo.training.play_only import evaluate as measure
    with naming_a_full_disk(settings.run.folder):
        measure(settings, checkpoint, output)


@commands.command(
    "cold-start",
    epilog=examples(
        "megatron-stppo cold-start config.yaml cold_start.output=runs/cold-start",
        "megatron-stppo cold-start config.yaml cold_start.output=runs/adapters model.lora.rank=16",
        "megatron-stppo train config.yaml model.lora.path=runs/adapters",
        "megatron-stppo cold-start config.yaml --critic runs/played cold_start.output=runs/critic",
        "megatron-stppo train config.yaml model.critic_path=runs/critic",
    ),
)
def cold_start(
    config: File,
    overrides: Overrides = None,
    critic: Annotated[
        Path | None,
        typer.Option(metavar="RUN_DIR", help="train only the critic, on the episodes of this run"),
    ] = None,
    modules: Modules = None,
) -> None:
    """Teach a model the format by supervised training on data.demonstrations, then play episodes with it.
    With model.lora only adapters are trained. With --critic, the critic learns the returns of recorded
    episodes."""
    command = "cold-start" if critic is None else "cold-start --critic"
    settings = open_config(config, overrides, command, modules=modules)
    if critic is not None:
        from megatron_stppo.validation import run_folder

        run_folder.check_pretraining(settings, critic)
    from megatron_stppo.validation import checks

    plays = critic is None and checks.plays(settings, "cold-start")
    with importing(engine=plays):
        from megatron_stppo.training import cold_start as stage
        from megatron_stppo.training import value_pretraining

        if plays:  # it imports vLLM
            from megatron_stppo.training.play_only import ColdEpisodes
    if critic is None:
        stage.cold_start(settings, ColdEpisodes if plays else None)
    else:
        value_pretraining.pretrain(settings, critic)


def start_training(settings: Config, resume: bool = False) -> None:
    """Train with a checked configuration."""
    if settings.serving.replicas is not None:
        from megatron_stppo.replicas.wire import address

        address.check(settings.serving.address, settings.serving.start, os.environ)
    lock(settings)
    from megatron_stppo.validation import attempts, run_folder

    if resume and is_first_rank():
        attempts.say_changes(settings)
    if resume and (step := run_folder.finished(settings)) is not None:
        from megatron_stppo.replicas.wire import keys

        if is_first_rank():  # left by a trainer that was killed after its last checkpoint
            keys.remove(settings.run.folder)
        with noting_the_end(settings):
            given = f"run.iterations={settings.run.iterations}"
            done = f"{given}: step_{step} is done, so nothing was trained; give more to continue the run"
            return say(done, is_first_rank())

    # before the imports, which take long: without a handler SIGUSR1 would end the process
    notice = PreemptionNotice(settings.run.end_margin)
    assemble = import_assembly(settings, notice.now)
    from megatron_stppo.cluster.deadlines import Watchdog
    from megatron_stppo.training import loop

    watchdog = Watchdog(settings.run.folder, settings.deadline_by_phase, process.rank(), process.world_size())
    with noting_the_end(settings), watchdog:
        loop.train(settings, resume, watchdog, notice, assemble)


def import_assembly(settings: Config, notice: Callable[[], str] = lambda: "") -> Assemble:
    """Import what training needs, and return what builds the models and plays the episodes.

    notice: returns why the run must end soon, or "".
    """
    with importing(settings, engine=settings.serving.replicas is None):
        if settings.serving.replicas is None:
            from megatron_stppo.training.colocated import assemble as colocated

            return partial(colocated, notice=notice)
        from megatron_stppo.replicas.trainer.start import assemble

        return partial(assemble, notice=notice)


@contextmanager
def noting_the_end(config: Config) -> Iterator[None]:
    """Write to exit.json in the run's folder how the block ended, because torchrun turns exit codes into 1.

    A killed process leaves no such file. After exit codes 0 and 93, which end the run for good, the report
    page is written too.
    """
    if is_first_rank():
        (config.run.folder / NOTE).unlink(missing_ok=True)
    try:
        with naming_a_full_disk(config.run.folder):
            yield
    except Ending as error:
        _note(config.run.folder, error.exit_code, str(error))
        raise
    except Exception as error:  # a crash's message may contain anything; only the log has it
        _note(config.run.folder, 1, type(error).__name__)
        raise
    _note(config.run.folder, 0, "done")


def _note(folder: Path, code: int, reason: str) -> None:
    if is_first_rank():
        with suppress(OSError):  # on a full disk there is still the exit code
            with replacing(folder / NOTE) as scratch:
                scratch.write_text(json.dumps({"code": code, "reason": reason}) + "\n", encoding="utf-8")
        if code in (0, DoNotRestart.exit_code):
            from megatron_stppo.observe.report import page

            if page.draw_at_the_end(folder):
                say(f"the report is {folder / page.FILE}")
