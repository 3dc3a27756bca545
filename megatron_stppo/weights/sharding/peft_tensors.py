"""Loads one rank's adapters from a folder in the format of the package `peft`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_stppo.config import ConfigError
from megatron_stppo.config.peft_folder import DIGEST, PREFIX, TENSORS, read_folder
from megatron_stppo.parallel.collectives import first, gather_records, raise_together
from megatron_stppo.weights.sharding.hf_checkpoint import weights_digest
from megatron_stppo.weights.sharding.hf_names import ModelShape
from megatron_stppo.weights.sharding.low_rank import fill
from megatron_stppo.weights.sharding.tiles import Spans


def load_peft(folder: Path, spans: Spans, parameters: Mapping[str, Tensor]) -> str:
    """Copy the rows that `spans` describe into `parameters`, in place, cast to each parameter's type. Padding
    rows stay as they are.

    spans: adapter_spans of this rank; validation/lora.py has compared names and shapes with the file's.
    Return 64 hexadecimal digits: the SHA-256 of adapter_model.safetensors. Collective: raises ConfigError on
    all ranks if the file cannot be read, if a number is not finite in its parameter's type, or if the ranks
    have different files.
    """
    path, digest, problem = Path(folder) / TENSORS, "", None
    try:
        with path.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        with safe_open(path, framework="pt") as file:
            for name, of_parameter in spans.items():
                parameter = parameters[name]
                fill(parameter, of_parameter, partial(_finite, file, parameter.dtype))
    except (OSError, SafetensorError) as error:
        problem = f"{TENSORS} cannot be read ({error}); write the adapter again"
    except ConfigError as error:
        problem = str(error)
    raise_together(problem, lambda found: ConfigError(f"model.lora.path={folder}: {first(found)}"), str)
    if len({found for (found,) in gather_records([digest], str)}) > 1:
        raise ConfigError(
            f"model.lora.path={folder}: {TENSORS} is not the same on all nodes; copy one folder to all of "
            "them, or use a shared one"
        )
    return digest


def check_base(folder: Path, model: Path, shape: ModelShape) -> None:
    """Raise ConfigError if an adapter records that it was trained on other weights than those of `model`.

    The adapters of convert to-peft and of the cold start have a hash of these weights, others have none.
    folder, model: of the adapter, of the weights. shape: that of the model. Collective, after load_peft.
    """
    recorded = read_folder(folder).recorded.get(DIGEST)
    if recorded and recorded != weights_digest(model, shape):
        raise ConfigError(
            f"model.lora.path={folder}: its adapter was trained on other weights than those in "
            f"model.path={model}; give the model that it was trained on, or another adapter"
        )


def _finite(file: safe_open, dtype: torch.dtype, key: str) -> Tensor:
    """Return a matrix. Raises ConfigError if a number of it is not finite in `dtype`."""
    whole: Tensor = file.get_tensor(PREFIX + key).to(dtype)
    if not whole.isfinite().all():
        kind = str(dtype).removeprefix("torch.")
        raise ConfigError(f"{key} has numbers that are not finite in {kind}; write the adapter again")
    return whole
