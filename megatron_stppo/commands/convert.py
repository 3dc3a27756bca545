"""The commands `convert to-hf`, `convert to-peft` and `convert to-megatron`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_stppo.base.files import check_absent, check_empty
from megatron_stppo.commands.open_run import File, Overrides, command_group, examples, importing, open_config

if TYPE_CHECKING:
    from megatron_stppo.config import Config

commands = command_group("Convert between checkpoints and Hugging Face folders.")
Checkpoint = Annotated[str, typer.Argument(help="checkpoint of the run in CONFIG.yaml: step_N or latest")]
Output = Annotated[Path, typer.Argument(help="new folder to write")]


@commands.command(
    "to-hf",
    epilog=examples(
        "megatron-stppo convert to-hf config.yaml latest trained",
        "megatron-stppo convert to-hf config.yaml step_20 trained run.name=second",
    ),
)
def to_hf(config: File, checkpoint: Checkpoint, output: Output, overrides: Overrides = None) -> None:
    """Write a checkpoint's actor as a Hugging Face folder, on any number of ranks."""
    settings = _open(config, checkpoint, output, overrides)
    with importing(quiet=True, engine=False):
        from megatron_stppo.checkpoint import convert

    convert.to_hf(settings, checkpoint, output)


@commands.command(
    "to-peft",
    epilog=examples(
        "megatron-stppo convert to-peft config.yaml latest adapters",
        "megatron-stppo convert to-peft config.yaml step_20 adapters run.name=second",
    ),
)
def to_peft(config: File, checkpoint: Checkpoint, output: Output, overrides: Overrides = None) -> None:
    """Write the adapters of a checkpoint's actor in PEFT's format, on any number of ranks."""
    settings = _open(config, checkpoint, output, overrides)
    from megatron_stppo.validation import lora

    lora.check_used(settings, "convert to-peft")
    with importing(quiet=True, engine=False):
        from megatron_stppo.checkpoint import convert

    convert.to_peft(settings, checkpoint, output)


@commands.command(
    "to-megatron",
    epilog=examples(
        "megatron-stppo convert to-megatron config.yaml runs/second/checkpoints",
        "megatron-stppo train config.yaml run.name=second --resume",
    ),
)
def to_megatron(
    config: File,
    output: Annotated[Path, typer.Argument(help="checkpoints folder to write")],
    overrides: Overrides = None,
) -> None:
    """Write model.path, a Hugging Face folder, as a megatron checkpoint, on any number of ranks."""
    settings = open_config(config, overrides, "convert")
    check_empty("output", output)
    with importing(quiet=True, engine=False):
        from megatron_stppo.checkpoint import convert

    convert.to_megatron(settings, output)


def _open(config: Path, checkpoint: str, output: Path, overrides: list[str] | None) -> Config:
    """Return the configuration of the run whose `checkpoint` is converted. Raises ConfigError."""
    settings = open_config(config, overrides, "convert", checkpoint=True)
    from megatron_stppo.validation import run_folder

    run_folder.check_step(settings, settings.run.folder, "checkpoint", checkpoint)
    check_absent("output", output)
    return settings
