"""The command `audit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_stppo.base.errors import Ending
from megatron_stppo.cluster.exits import crash
from megatron_stppo.commands.open_run import open_config
from megatron_stppo.commands.options import Overrides, command_group, examples

commands = command_group()


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
    from megatron_stppo.cluster.launch import process

    process.prepare(engine=False)
    process.check(settings)
    from megatron_stppo.evidence.audit.audit import audit as check
    from megatron_stppo.evidence.audit.report import CRASHED

    try:
        code = check(settings, run, tolerance)
    except Ending:
        raise
    except Exception as error:
        code = crash(error, CRASHED)  # not that of a difference
    raise typer.Exit(code)
