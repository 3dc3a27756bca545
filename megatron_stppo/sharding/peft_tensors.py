"""Loads one rank's adapters from a folder in the format of the package `peft`."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_stppo.config import ConfigError
from megatron_stppo.config.peft_folder import PREFIX, TENSORS, read_folder
from megatron_stppo.parallel.collectives import broadcast_bytes
from megatron_stppo.parallel.raise_together import raise_together
from megatron_stppo.sharding.hf_names import ModelShape
from megatron_stppo.sharding.tiles import PADDING, Spans
from megatron_stppo.sharding.trunk_digest import trunk_digest


def load_peft(folder: Path, spans: Spans, parameters: Mapping[str, Tensor]) -> None:
    """Copy the rows that `spans` describe into `parameters`, in place, cast to each parameter's type. Padding
    rows stay as they are.

    spans: of a rank's adapters (sharding/low_rank.py). Collective: raises ConfigError on all ranks if a file
    cannot be read, or if a number of a matrix is not finite in the parameter's type. validation/lora.py has
    compared names and shapes.
    """
    problem = None
    try:
        with safe_open(Path(folder) / TENSORS, framework="pt") as file:
            for name, of_parameter in spans.items():
                problem = problem or _fill(file, of_parameter, parameters[name])
    except (OSError, SafetensorError) as error:
        problem = f"{TENSORS} cannot be read ({error}); write the adapter again"
    raise_together(
        problem, lambda found: ConfigError(f"model.lora.path={folder}: {next(iter(found.values()))}"), str
    )


def check_base(folder: Path, model: Path, shape: ModelShape) -> None:
    """Raise ConfigError if an adapter records that it was trained on other weights than those of `model`.

    The adapters of convert to-peft and of the cold start have a hash of these weights, others have none.
    folder, model: of the adapter, of the weights. shape: that of the model. Collective.
    """
    recorded = read_folder(folder).digest
    if recorded and recorded != trunk_digest(model, shape):
        raise ConfigError(
            f"model.lora.path={folder}: its adapter was trained on other weights than those in "
            f"model.path={model}; give the model that it was trained on, or another adapter"
        )


@functools.cache
def file_digest(folder: Path) -> str:
    """Return 64 hexadecimal digits: the SHA-256 of a folder's adapter_model.safetensors.

    Collective: the first rank reads the file, once for a folder. Raises ConfigError on all ranks.
    """
    digest, problem = "", None
    if dist.get_rank() == 0:
        try:
            with (Path(folder) / TENSORS).open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            problem = (
                f"model.lora.path={folder}: {TENSORS} cannot be read ({error.strerror}); restore the file"
            )
    raise_together(problem, lambda found: ConfigError(found[0]), str)
    return broadcast_bytes(digest.encode(), source=0).decode()


@torch.no_grad()
def _fill(file: safe_open, spans: tuple, parameter: Tensor) -> str | None:
    """Write this rank's rows of one A or B into a parameter, and return what is wrong with them, or None."""
    for span in spans:
        if span.hf_key == PADDING:
            continue
        whole: Tensor = file.get_tensor(PREFIX + span.hf_key).to(parameter.dtype)
        if not whole.isfinite().all():
            kind = str(parameter.dtype).removeprefix("torch.")
            return f"{span.hf_key} has numbers that are not finite in {kind}; write the adapter again"
        rows = whole.narrow(span.dim, span.start, span.size)
        parameter.narrow(span.dim, span.local, span.size).copy_(rows)
    return None
