"""Check the nodes of a job: GPUs, versions, network, run folder. One process per rank; see preflight.sbatch.

    torchrun --standalone --nproc-per-node 8 -m examples.slurm.preflight [--folder FOLDER] [--output FILE]

Run it in the folder of this repository. Exit code 2: a check failed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from examples.slurm.preflight import limits
from megatron_stppo.base.printing import drop_unwritable
from megatron_stppo.cluster.launch import process
from megatron_stppo.commands.open_run import command_group, examples
from megatron_stppo.config import ConfigError

SCRIPT = "-m examples.slurm.preflight"
commands = command_group()


@commands.command(
    epilog=examples(
        f"torchrun --standalone --nproc-per-node 8 {SCRIPT}",
        "sbatch --nodes=8 examples/slurm/preflight.sbatch --limit min_bandwidth_node=300",
    )
)
def preflight(
    folder: Annotated[Path, typer.Option(help="folder in which runs write")] = Path("runs"),
    output: Annotated[Path | None, typer.Option(help="JSON file for all measurements")] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="change a limit of docs/cluster.md; may be repeated"),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=1, help="longest time of one measurement, and of the start")
    ] = 300,
    size: Annotated[
        int, typer.Option(min=1, help="MiB that every node writes to the folder and reads back")
    ] = 1024,
) -> None:
    """Check the nodes of a job: GPUs, versions, network, run folder; exit 2 if a check fails."""
    limits_of_check = limits.read(limit or ())
    process.discover()
    process.set_ranks()
    from examples.slurm.preflight.check import Settings, check

    code = check(Settings(folder, limits_of_check, seconds, size * 2**20, output))
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    drop_unwritable("stderr")
    try:
        commands()
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
