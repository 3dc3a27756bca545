"""The command `serve`."""

from __future__ import annotations

import os
import re
import signal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_stppo.base.errors import CannotServe, ConfigError
from megatron_stppo.cluster.exits import end_after, end_normally, has_ended, is_first_rank
from megatron_stppo.cluster.launch import process
from megatron_stppo.cluster.preemption import OF_A_TERMINAL, PreemptionNotice
from megatron_stppo.commands.check import MARK
from megatron_stppo.commands.open_run import Overrides, command_group, examples, importing
from megatron_stppo.observe.console import say

if TYPE_CHECKING:
    from megatron_stppo.config import Config

commands = command_group()
# What may differ between a run and its replica. All other fields are the run's.
OWN = (
    "rollout.kv_cache_gib",
    "rollout.gpu_memory_utilization",
    "rollout.max_sequences",
    "rollout.engine_tensor",
    "serving.concurrency",
)
OWN_SECTION = "environment."
NOT_OWN = ("environment.max_turns", "environment.max_observation_tokens")  # episodes are equal everywhere


@commands.command(
    epilog=examples(
        "megatron-stppo serve runs/first",
        "megatron-stppo serve runs/first rollout.kv_cache_gib=4 --name big",
        "torchrun --standalone --nproc-per-node 4 -m megatron_stppo serve runs/first rollout.engine_tensor=4",
    )
)
def serve(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", show_default=False, help="the run to serve")],
    overrides: Overrides = None,
    name: Annotated[
        str, typer.Option(show_default=False, help="unique in the run; default: host and process id")
    ] = "",
    wait: Annotated[float, typer.Option(min=0, help="seconds to wait until `train` has started")] = 600.0,
    parent: Annotated[
        int | None,
        typer.Option(metavar="PID", help="end when this process, which has started the replica, has ended"),
    ] = None,
) -> None:
    """Play episodes for a run of `train` with serving.replicas, as one of its vLLM replicas; one process per
    tensor-parallel rank."""
    from megatron_stppo.config.run import NAME
    from megatron_stppo.replicas.wire import keys

    if parent is not None:
        end_after(parent)
    _check_overrides(overrides or [])
    if name and not re.fullmatch(NAME, name):
        raise ConfigError(
            f"--name={name}: give up to 64 letters, digits, '.', '_' and '-', without a leading '.'"
        )
    process.discover()
    # Slurm sends it to all steps of a job some time before the end. The trainer then completes its iteration,
    # for which it needs the replicas, and ends them.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    waits = partial(say, f"waiting up to {wait:g} s for the trainer of {run}", is_first_rank())
    connection = None if has_ended(parent) else keys.find(run, wait, waits)
    if connection is None or has_ended(parent):  # the file may be of the next attempt, with its own replicas
        raise CannotServe(f"the trainer, process {parent}, has ended")
    settings = _open(run, overrides)
    # before the imports, which take long: without a handler a signal would end the process
    leave = (signal.SIGTERM, *OF_A_TERMINAL)
    notice = PreemptionNotice(0, "leaving the run after this engine step", leave)
    with importing():
        from megatron_stppo.agents.endpoint.opening import open_environment
        from megatron_stppo.replicas.replica import start
        from megatron_stppo.training.colocated import build_engine
    end_normally()
    build = partial(build_engine, settings, process.dtype(settings), settings.replays_rollout)
    opens = partial(open_environment)
    if (run / MARK).exists():  # of `verify`
        from megatron_stppo.evidence.bench.records import Recordings

        records = Recordings(run)
        build, opens = partial(records.building, build), partial(records.opening, opens)
    start.serve(settings, run, connection, notice, name, build, opens)


def _open(run: Path, overrides: list[str] | None) -> Config:
    """Return the configuration of the run's newest attempt, after the checks that need no torch."""
    from megatron_stppo.config.file import load
    from megatron_stppo.environments import choose
    from megatron_stppo.replicas.wire import keys
    from megatron_stppo.validation import checks

    config = load(run / keys.FOLDER / keys.CONFIG, overrides).beside(keys.modules(run) or run)
    checks.check_replica(config, int(os.environ.get("WORLD_SIZE", "1")))
    choose.check(config.environment, resume=True)
    return config


def _check_overrides(overrides: list[str]) -> None:
    for override in overrides:
        field = override.partition("=")[0]
        if field in NOT_OWN or (field not in OWN and not field.startswith(OWN_SECTION)):
            raise ConfigError(
                f"{field}: a replica takes it from the run; only {', '.join(OWN)} and {OWN_SECTION}*, "
                f"without {' and '.join(NOT_OWN)}, can differ from the run's"
            )
