"""The command `train`."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_stppo.cli.open_run import importing, lock, open_config
from megatron_stppo.cli.options import File, Modules, Overrides, command_group, examples
from megatron_stppo.exits import is_first_rank, noting_the_end

if TYPE_CHECKING:
    from megatron_stppo.config import Config
    from megatron_stppo.replicas.trainer.recorded import Recorded

commands = command_group()


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
    start(settings, resume)


def start(settings: Config, resume: bool = False, recorded: Recorded | None = None) -> None:
    """Train with a checked configuration. recorded: the asynchronous run to repeat."""
    if settings.serving.replicas is not None:
        from megatron_stppo.replicas.wire import address

        address.check(settings.serving.address, settings.serving.start, os.environ)
    lock(settings)
    from megatron_stppo.launch import process
    from megatron_stppo.resilience.preemption import PreemptionNotice
    from megatron_stppo.telemetry.console import say
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
    with importing():
        process.prepare(engine=settings.serving.replicas is None)
        process.check(settings)
        from megatron_stppo import loop

        assemble: loop.Assemble
        if settings.serving.replicas is None:
            from megatron_stppo.worker import assemble as colocated

            assemble = colocated
        else:
            from megatron_stppo.replicas.trainer.start import assemble as served

            assemble = partial(served, recorded=recorded, notice=lambda: notice.reason)
    from megatron_stppo.resilience.deadlines import Watchdog

    watchdog = Watchdog(settings.run.folder, settings.deadline_by_phase, process.rank(), process.world_size())
    with noting_the_end(settings), watchdog:
        loop.train(settings, resume, watchdog, notice, assemble)
