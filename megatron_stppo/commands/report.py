"""The commands `report` and `compare`."""

from pathlib import Path
from typing import Annotated

import typer

from megatron_stppo.commands.open_run import command_group, examples

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
    from megatron_stppo.observe.report import page

    target = output or (runs[0] if len(runs) == 1 else Path()) / page.FILE
    for note in page.draw(runs, target, page.TRAJECTORIES if trajectories is None else trajectories):
        typer.echo(note, err=True)
    typer.echo(target)


@commands.command(
    epilog=examples(
        "megatron-stppo compare grid.yaml            runs what has no result yet; may be given again",
        "megatron-stppo compare grid.yaml --report   the contrasts of the results so far",
    )
)
def compare(
    grid: Annotated[Path, typer.Argument(metavar="GRID.yaml", show_default=False)],
    report: Annotated[bool, typer.Option("--report", help="run nothing; print the contrasts")] = False,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="runs at a time; default: as cores or GPUs allow; with more, runs share a GPU, and the grid "
            "must leave each its memory (rollout.gpu_memory_utilization)",
        ),
    ] = None,
) -> None:
    """Run a configuration with every arm, setting and seed of a grid, and print the declared contrasts with
    intervals; one HTML page shows all. Exit 1 if a cell has no result."""
    from megatron_stppo.evidence.compare import contrasts
    from megatron_stppo.evidence.compare.contrasts import text, write
    from megatron_stppo.evidence.compare.grid import load
    from megatron_stppo.evidence.compare.runner import Runner

    given = load(grid)
    complete = report or Runner(given, jobs).work()
    found = contrasts.read(given.folder)
    typer.echo(text(given, found))
    if found:
        target = given.folder / f"{grid.stem}.html"
        write(given, found, target)
        typer.echo(target)
    raise typer.Exit(int(not complete))
