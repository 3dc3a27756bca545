"""The commands `convert to-hf`, `convert to-peft`, `convert to-megatron`, `import-gguf`, `import-mxfp4`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from megatron_stppo.base.files import check_absent, check_empty
from megatron_stppo.commands.open_run import File, Overrides, command_group, examples, importing, open_config
from megatron_stppo.observe.console import say

if TYPE_CHECKING:
    from megatron_stppo.config import Config
    from megatron_stppo.weights.sharding.hf_names import ModelShape

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


imports = command_group()


@imports.command(
    "import-gguf",
    epilog=examples(
        "megatron-stppo import-gguf SmolLM2-135M-Instruct.Q4_1.gguf models/smollm2",
        "megatron-stppo import-gguf model.gguf models/new --dtype float32",
    ),
)
def import_gguf(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="a GGUF file of llama.cpp", show_default=False)
    ],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="new folder to write", show_default=False)],
    dtype: Annotated[Literal["bfloat16", "float32"], typer.Option(help="type of the weights")] = "bfloat16",
) -> None:
    """Write a GGUF file as a Hugging Face folder, which model.path accepts."""
    import torch

    from megatron_stppo.checkpoint import imports

    _say_written(folder, imports.import_gguf(file, folder, getattr(torch, dtype), _progress), dtype)


@imports.command(
    "import-mxfp4",
    epilog=examples("megatron-stppo import-mxfp4 downloads/gpt-oss-20b models/gpt-oss-20b"),
)
def import_mxfp4(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="folder of a model in MXFP4", show_default=False)
    ],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="new folder to write", show_default=False)],
) -> None:
    """Write weights that are published in MXFP4 in bfloat16, as a folder which model.path accepts."""
    from megatron_stppo.checkpoint import imports

    _say_written(folder, imports.import_mxfp4(source, folder, _progress), "bfloat16")


def _progress(names: Sequence[str]) -> Iterable[str]:
    from rich.progress import track

    return track(names, "decoding")


def _say_written(folder: Path, shape: ModelShape, dtype: str) -> None:
    say(f"wrote {folder}: {shape.family}, {shape.layers} layers, {shape.vocab} tokens, {dtype}")
