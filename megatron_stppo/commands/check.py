"""The commands `audit`, `audit-tokens`, `check-layouts`, `doctor` and `verify`."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from megatron_stppo.base.errors import Ending
from megatron_stppo.cluster.exits import crash, is_first_rank, naming_a_full_disk
from megatron_stppo.cluster.launch import process
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
from megatron_stppo.commands.train import import_assembly

commands = command_group()
Tolerance = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="largest difference of a token's log-prob, in nats; default: a limit for each token, from the "
        "rounding of its own computation",
    ),
]
MARK = ".verify"  # in a folder that `verify` may remove


@commands.command(
    epilog=examples(
        "megatron-stppo audit runs/first",
        "torchrun --standalone --nproc-per-node 8 -m megatron_stppo audit runs/first parallel.tensor=8",
    )
)
def audit(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", show_default=False, help="the run to audit")],
    overrides: Overrides = None,
    tolerance: Tolerance = None,
) -> None:
    """Check that each recorded log-prob is that of the recorded policy version; exit 1 if not, and 3 if
    files or checkpoints of the run are damaged."""
    from megatron_stppo.validation import run_folder

    settings = open_config(run_folder.config_of(run), overrides, "audit", checkpoint=True)
    run_folder.check_audit(settings, run)
    with importing(settings, quiet=True, engine=False):
        from megatron_stppo.evidence.audit.audit import audit as check

    raise typer.Exit(_code(lambda: check(settings, run, tolerance)))


def _code(check: Callable[[], int]) -> int:
    """Return the exit code of an audit; CRASHED, not that of a difference, for an error that is no Ending."""
    from megatron_stppo.evidence.audit.audit import CRASHED

    try:
        return check()
    except Ending:
        raise
    except Exception as error:
        return crash(error, CRASHED)


@commands.command(
    epilog=examples(
        "megatron-stppo audit-tokens rollouts.jsonl models/step-40",
        "torchrun --nproc-per-node 8 -m megatron_stppo audit-tokens rollouts.jsonl MODEL parallel.tensor=8",
    )
)
def audit_tokens(
    file: Annotated[Path, typer.Argument(metavar="FILE", show_default=False)],
    model: Annotated[Path, typer.Argument(metavar="MODEL", show_default=False)],
    overrides: Overrides = None,
    tolerance: Tolerance = None,
) -> None:
    """Check whether the log-probs of FILE, from another trainer, are those of the Hugging Face folder MODEL,
    and say what else they may be; exit 1 if they are not. Default: model.dtype=bfloat16."""
    from megatron_stppo.config.file import overridden
    from megatron_stppo.evidence.audit import dumps
    from megatron_stppo.validation import checks
    from megatron_stppo.weights.sharding.hf_names import read_shape

    process.discover()
    settings = overridden({"model": {"path": str(model), "dtype": "bfloat16"}}, overrides or [])
    checks.check(settings, int(os.environ.get("WORLD_SIZE", "1")), "audit")
    episodes = dumps.read(file, read_shape(model))
    with importing(settings, quiet=True, engine=False):
        from megatron_stppo.evidence.audit.tokens import audit_tokens as check

    raise typer.Exit(_code(lambda: check(settings, episodes, tolerance)))


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
    with importing(quiet=True, engine=False):
        from megatron_stppo.evidence.layouts.comparison import check_layouts as check

    process.start(settings)
    broken = check(settings, output)
    process.stop()
    raise typer.Exit(int(broken > 0))


@commands.command(epilog=examples("megatron-stppo doctor"))
def doctor() -> None:
    """List what is installed and what is missing, and why it matters; exit 1 if the quickstart cannot run."""
    from megatron_stppo.cluster.launch import doctor as report

    raise typer.Exit(report.doctor())


@commands.command(
    epilog=examples(
        "megatron-stppo verify config.yaml",
        "megatron-stppo verify config.yaml model.lora.rank=32 --json verify.json",
        "torchrun --standalone --nproc-per-node 8 -m megatron_stppo verify config.yaml --layers 0",
        "sbatch --nodes=1 examples/slurm/verify.sbatch examples/qwen2.5-7b/config.yaml",
    )
)
def verify(
    config: File,
    overrides: Overrides = None,
    output: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="write the findings")] = None,
    layers: Annotated[
        int | None,
        typer.Option(
            min=0,
            show_default=False,
            help="layers of the models; 0: all; default: 4, or more if stages need it",
        ),
    ] = None,
    modules: Modules = None,
) -> None:
    """Check weights, gradients, optimizer, rewards, tokens and resume of a configuration before a long run;
    exit 1 if a check fails."""
    from megatron_stppo.replicas.wire import address
    from megatron_stppo.validation import checks, run_folder

    settings = open_config(config, overrides, "verify", modules=modules)
    if output is not None:
        checks.check_folder("--json", output.parent)
    settings = settings.changed(run={"name": f"{settings.run.name[:57]}-verify"})
    mark = settings.run.folder / MARK
    if not mark.exists():
        run_folder.check_new(settings, "`verify` would remove it; move it, or give another run.name")
    if settings.serving.replicas is not None:
        address.check(settings.serving.address, settings.serving.start, os.environ)
    lock(settings)
    if is_first_rank():
        mark.touch()
        # those of a `verify` that was killed
        shutil.rmtree(settings.run.folder / "checkpoints", ignore_errors=True)
    from megatron_stppo.evidence.bench.depth import reduced

    settings = reduced(settings, layers)
    assemble = import_assembly(settings)
    from megatron_stppo.evidence.verification import verify as check

    with naming_a_full_disk(settings.run.folder):
        raise typer.Exit(int(not check(settings, assemble, output)))
