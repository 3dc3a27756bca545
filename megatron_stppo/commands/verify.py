"""The command `verify`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Annotated

import typer

from megatron_stppo.cluster.exits import is_first_rank, naming_a_full_disk
from megatron_stppo.commands.open_run import lock, open_config
from megatron_stppo.commands.options import File, Overrides, command_group, examples
from megatron_stppo.commands.train import import_assembly

commands = command_group()
MARK = ".verify"  # in a folder that `verify` may remove


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
) -> None:
    """Check weights, gradients, optimizer, rewards, tokens and resume of a configuration before a long run;
    exit 1 if a check fails."""
    from megatron_stppo.replicas.wire import address
    from megatron_stppo.validation import checks, run_folder

    settings = open_config(config, overrides, "verify")
    if output is not None:
        checks.check_folder("--json", output.parent)
    run = settings.run.model_copy(update={"name": f"{settings.run.name[:57]}-verify"})
    settings = settings.model_copy(update={"run": run})
    mark = run.folder / MARK
    if not mark.exists():
        run_folder.check_new(settings, "`verify` would remove it; move it, or give another run.name")
    if settings.serving.replicas is not None:
        address.check(settings.serving.address, settings.serving.start, os.environ)
    lock(settings)
    if is_first_rank():
        mark.touch()
        shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)  # of a `verify` that was killed
    from megatron_stppo.evidence.verify.depth import reduced

    settings = reduced(settings, layers)
    assemble = import_assembly(settings)
    from megatron_stppo.evidence.verify.check import verify as check

    with naming_a_full_disk(settings.run.folder):
        raise typer.Exit(int(not check(settings, assemble, output)))
