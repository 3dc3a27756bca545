"""The commands `check-layouts`, `plan`, `report` and `doctor`, which train nothing."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from megatron_stppo.cli.open_run import open_config
from megatron_stppo.cli.options import File, Overrides, command_group, examples
from megatron_stppo.exits import crash, exit_code

commands = command_group()


def check_layouts(
    config: File,
    overrides: Overrides = None,
    output: Annotated[Path | None, typer.Option(help="JSON file for the measurements")] = None,
) -> None:
    """Compute one step under every layout that fits the ranks; exit 1 if two of them differ."""
    settings = open_config(config, overrides, "check-layouts")
    from megatron_stppo.launch import process

    process.prepare(engine=False)
    from megatron_stppo.layout_check.check import check_layouts as check

    raise typer.Exit(int(check(settings, output) > 0))


commands.command(
    "check-layouts",
    epilog=examples("torchrun --standalone --nproc-per-node 4 -m megatron_stppo check-layouts config.yaml"),
)(check_layouts)
commands.command("check-invariance", hidden=True)(check_layouts)  # the old name


@commands.command(
    epilog=examples(
        "megatron-stppo plan config.yaml --gpus 64",
        "megatron-stppo plan config.yaml --gpus 64 parallel.tensor=8 --json",
        "megatron-stppo plan config.yaml --asynchronous --gpus 64 --gpus 256 --from runs/first",
        "megatron-stppo plan config.yaml --asynchronous --gpus 64 --assume tool_seconds=2",
    )
)
def plan(
    config: File,
    gpus: Annotated[
        list[int],
        typer.Option(
            min=1,
            help="GPUs of the run; the command itself needs none. May be repeated with --asynchronous",
        ),
    ],
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of tables")] = False,
    asynchronous: Annotated[
        bool,
        typer.Option(
            "--asynchronous",
            help="simulate asynchronous training with every split of the GPUs between training and serving, "
            "and colocated training",
        ),
    ] = False,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from", help="--asynchronous: run whose episode lengths are used; default: assumed lengths"
        ),
    ] = None,
    assume: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="--asynchronous: replace an assumption, such as tool_seconds or tool_seconds_p99; may be "
            "repeated. The command prints all of them",
        ),
    ] = None,
) -> None:
    """Plan a run on any number of GPUs: memory, bytes of reshard and checkpoint, lower bounds of times."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # also where there is a GPU: nothing is computed
    from megatron_stppo.config import ConfigError

    if asynchronous:
        return _plan_asynchronous(config, overrides, gpus, source, assume or [], as_json)
    for option, given in (("--from", source), ("--assume", assume)):
        if given:
            raise ConfigError(f"{option}: only plan --asynchronous uses it; add --asynchronous or remove it")
    if len(gpus) > 1:
        raise ConfigError(f"--gpus: {len(gpus)} values; give one, or add --asynchronous")
    settings = open_config(config, overrides, "plan", world=gpus[0])
    from megatron_stppo.launch import process

    process.prepare(engine=False, device="meta")
    from megatron_stppo.plan.dry_run import plan as dry_run
    from megatron_stppo.plan.report import write

    found = dry_run(settings, gpus[0])
    write(found, as_json)
    if found.broken:
        raise ConfigError("\n".join(found.broken))


def _plan_asynchronous(
    config: Path,
    overrides: list[str] | None,
    gpus: list[int],
    source: Path | None,
    assume: list[str],
    as_json: bool,
) -> None:
    """Print forecasts of asynchronous training. Raises ConfigError if no number of GPUs has a split."""
    from megatron_stppo.config import ConfigError
    from megatron_stppo.config_file import load
    from megatron_stppo.plan import assumptions
    from megatron_stppo.validation import splits

    settings = load(config, overrides)
    given = assumptions.read(settings, assume)
    candidates = {count: splits.candidates(settings, count) for count in gpus}
    from megatron_stppo.launch import process

    process.prepare(engine=False, device="meta")
    from megatron_stppo.plan.calibration import read_lengths
    from megatron_stppo.plan.outlook import Planner
    from megatron_stppo.plan.outlook_report import write
    from megatron_stppo.plan.simulation.workload import Workload

    lengths = assumptions.lengths(settings, given) if source is None else read_lengths(source)
    planner = Planner(settings, Workload(lengths, assumptions.tools(settings, given)), given)
    outlooks = [
        planner.outlook(count, found.trainers, found.left_out, found.refusal)
        for count, found in candidates.items()
    ]
    write(planner, outlooks, None if source is None else str(source), as_json)
    if not any(one.splits for one in outlooks):
        lines = [line for one in outlooks for line in one.left_out]
        raise ConfigError("\n".join(["asynchronous training does not fit these GPUs", *lines]))


@commands.command(
    epilog=examples(
        "megatron-stppo audit runs/first",
        "torchrun --standalone --nproc-per-node 8 -m megatron_stppo audit runs/first parallel.tensor=8",
    )
)
def audit(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", show_default=False, help="the run to audit")],
    overrides: Overrides = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="largest difference of a token's log-prob, in nats; default: a limit for each token, from "
            "the rounding of its own computation",
        ),
    ] = None,
) -> None:
    """Check that each recorded log-prob is that of the recorded policy version; exit 1 if not, and 3 if
    files or checkpoints of the run are damaged."""
    from megatron_stppo.validation import sources

    settings = open_config(sources.config_of(run), overrides, "audit", checkpoint=True)
    sources.check_audit(settings, run)
    from megatron_stppo.launch import process

    process.prepare(engine=False)
    process.check(settings)
    from megatron_stppo.commands.audit import audit as check
    from megatron_stppo.commands.audit_report import CRASHED

    try:
        code = check(settings, run, tolerance)
    except Exception as error:
        if exit_code(error) is not None:
            raise
        code = crash(error, CRASHED)  # not that of a difference
    raise typer.Exit(code)


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
        from megatron_stppo.launch import doctor as report

        raise typer.Exit(report.doctor())
    from megatron_stppo.launch import process
    from megatron_stppo.preflight import limits

    limits_of_check = limits.read(limit or ())
    process.discover()
    process.set_ranks()
    from megatron_stppo.preflight.check import Settings, check

    code, hangs = check(Settings(folder, limits_of_check, seconds, size * 2**20, output))
    if hangs:
        sys.stdout.flush()
        os._exit(code)
    raise typer.Exit(code)
