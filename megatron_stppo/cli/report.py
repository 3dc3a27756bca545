"""The command `report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_stppo.cli.options import command_group, examples

commands = command_group()


@commands.command(
    epilog=examples(
        "megatron-stppo report runs/first",
        "megatron-stppo report runs/first runs/second --output compared.html",
    )
)
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", show_default=False)],
    output: Annotated[
        Path | None,
        typer.Option(
            help="file to write; default: report.html in the run's folder, or here for several runs"
        ),
    ] = None,
    trajectories: Annotated[
        int | None, typer.Option(min=0, help="largest number of episodes of each run; default: 400")
    ] = None,
) -> None:
    """Write one HTML page that shows a run or compares several; it needs only a browser."""
    from megatron_stppo.report import page

    target = output or (runs[0] if len(runs) == 1 else Path()) / page.FILE
    for note in page.draw(runs, target, page.TRAJECTORIES if trajectories is None else trajectories):
        typer.echo(note, err=True)
    typer.echo(target)
