"""The commands `check-layouts` and `doctor`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from megatron_stppo.commands.open_run import open_config
from megatron_stppo.commands.options import File, Overrides, command_group, examples

commands = command_group()


@commands.command(
    "check-layouts",
    epilog=examples("torchrun --standalone --nproc-per-node 4 -m megatron_stppo check-layouts config.yaml"),
)
def check_layouts(
    config: File,
    overrides: Overrides = None,
    output: Annotated[Path | None, typer.Option(help="JSON file for the measurements")] = None,
) -> None:
    """Compute one step under every layout that fits the ranks; exit 1 if two of them differ."""
    settings = open_config(config, overrides, "check-layouts")
    from megatron_stppo.cluster.launch import process

    process.prepare(engine=False)
    from megatron_stppo.evidence.layouts.check import check_layouts as check

    raise typer.Exit(int(check(settings, output) > 0))


@commands.command(
    epilog=examples(
        "megatron-stppo doctor",
        "torchrun --standalone --nproc-per-node 8 -m megatron_stppo doctor --cluster",
        "sbatch --nodes=8 examples/slurm/preflight.sbatch --limit min_bandwidth_node=300",
    )
)
def doctor(
    cluster: Annotated[
        bool,
        typer.Option(
            "--cluster",
            help="check the nodes of a job: GPUs, versions, network, run folder; exit 2 if a check fails",
        ),
    ] = False,
    folder: Annotated[Path, typer.Option(help="--cluster: folder in which runs write")] = Path("runs"),
    output: Annotated[Path | None, typer.Option(help="--cluster: JSON file for all measurements")] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="--cluster: change a limit of docs/cluster.md; may be repeated"
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=1, help="--cluster: longest time of one measurement, and of the start")
    ] = 300,
    size: Annotated[
        int, typer.Option(min=1, help="--cluster: MiB that every node writes to the folder and reads back")
    ] = 1024,
) -> None:
    """List what is installed and what is missing, and why it matters; exit 1 if the quickstart cannot run."""
    if not cluster:
        from megatron_stppo.cluster.launch import doctor as report

        raise typer.Exit(report.doctor())
    from megatron_stppo.cluster.launch import process
    from megatron_stppo.cluster.preflight import limits

    limits_of_check = limits.read(limit or ())
    process.discover()
    process.set_ranks()
    from megatron_stppo.cluster.preflight.check import Settings, check

    code, hangs = check(Settings(folder, limits_of_check, seconds, size * 2**20, output))
    if hangs:
        sys.stdout.flush()
        os._exit(code)
    raise typer.Exit(code)
