"""Loads one rank's adapters from a folder in the format of the package `peft`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Mapping
from io import BufferedReader
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_stppo.config import ConfigError
from megatron_stppo.config.peft_folder import PREFIX, TENSORS, read_folder
from megatron_stppo.parallel.collectives import gather_records
from megatron_stppo.parallel.raise_together import first, raise_together
from megatron_stppo.weights.sharding.hf_names import ModelShape
from megatron_stppo.weights.sharding.tiles import PADDING, Span, Spans
from megatron_stppo.weights.sharding.weights_digest import weights_digest

DIFFERENT = "is not the same on all nodes; copy one folder to all of them, or use a shared one"
CHANGED = "changed while the models were built; start again when it is complete"


def load_peft(
    folder: Path, spans: Spans, shapes: Mapping[str, tuple[int, int]], parameters: Mapping[str, Tensor]
) -> str:
    """Copy the rows that `spans` describe into `parameters`, in place, cast to each parameter's type. Padding
    rows stay as they are.

    spans, shapes: adapter_spans of this rank, and adapter_shapes of low_rank.py. validation/lora.py
    has compared names and shapes, perhaps of an earlier file. Return 64 hexadecimal digits: the SHA-256 of
    the adapter_model.safetensors that was read. Collective: raises ConfigError on all ranks if a file cannot
    be read, if the ranks read different ones, if a matrix has another shape, or if a number of it is not
    finite in the parameter's type.
    """
    digest, problem = "", None
    try:
        # One open file, hashed and read: another file can get its name meanwhile.
        with (Path(folder) / TENSORS).open("rb") as opened:
            digest, problem = _copy(opened, spans, shapes, parameters)
    except (OSError, SafetensorError) as error:
        problem = f"{TENSORS} cannot be read ({error}); write the adapter again"
    raise_together(problem, lambda found: ConfigError(f"model.lora.path={folder}: {first(found)}"), str)
    if len({found for (found,) in gather_records([digest], str)}) > 1:
        raise ConfigError(f"model.lora.path={folder}: {TENSORS} {CHANGED}")
    return digest


def check_one_file(folder: Path | None, digests: Collection[str | None]) -> None:
    """Raise ConfigError unless models have begun with one file. digests: what load_peft returned for each."""
    if len(set(digests)) > 1:
        raise ConfigError(f"model.lora.path={folder}: {TENSORS} {CHANGED}")


def check_base(folder: Path, model: Path, shape: ModelShape) -> None:
    """Raise ConfigError if an adapter records that it was trained on other weights than those of `model`.

    The adapters of convert to-peft and of the cold start have a hash of these weights, others have none.
    folder, model: of the adapter, of the weights. shape: that of the model. Collective: raises on all ranks,
    also if a rank cannot read the folder or if ranks read different hashes.
    """
    recorded, problem = None, None
    try:
        recorded = read_folder(folder).digest
    except ConfigError as error:
        problem = str(error)
    raise_together(problem, lambda found: ConfigError(first(found)), str)
    if len({found for (found,) in gather_records([recorded or ""], str)}) > 1:
        raise ConfigError(f"model.lora.path={folder}: {DIFFERENT}")
    if recorded and recorded != weights_digest(model, shape):
        raise ConfigError(
            f"model.lora.path={folder}: its adapter was trained on other weights than those in "
            f"model.path={model}; give the model that it was trained on, or another adapter"
        )


def _copy(
    opened: BufferedReader,
    spans: Spans,
    shapes: Mapping[str, tuple[int, int]],
    parameters: Mapping[str, Tensor],
) -> tuple[str, str | None]:
    """Fill the parameters. Return the digest of the file, and what is wrong with it or None."""
    digest, written = hashlib.file_digest(opened, "sha256").hexdigest(), os.fstat(opened.fileno()).st_mtime_ns
    problem = None
    with safe_open(f"/proc/self/fd/{opened.fileno()}", framework="pt") as file:
        for name, of_parameter in spans.items():
            problem = problem or _fill(file, of_parameter, shapes, parameters[name])
    if os.fstat(opened.fileno()).st_mtime_ns != written:
        problem = f"{TENSORS} {CHANGED}"
    return digest, problem


@torch.no_grad()
def _fill(
    file: safe_open, spans: tuple[Span, ...], shapes: Mapping[str, tuple[int, int]], parameter: Tensor
) -> str | None:
    """Write this rank's rows of one A or B into a parameter, and return what is wrong with them, or None."""
    for span in spans:
        if span.hf_key == PADDING:
            continue
        held, wanted = file.get_slice(PREFIX + span.hf_key).get_shape(), list(shapes[span.hf_key])
        if held != wanted:
            return f"{span.hf_key} has shape {held[:8]}, here it must be {wanted}; start again with one file"
        whole: Tensor = file.get_tensor(PREFIX + span.hf_key).to(parameter.dtype)
        if not whole.isfinite().all():
            kind = str(parameter.dtype).removeprefix("torch.")
            return f"{span.hf_key} has numbers that are not finite in {kind}; write the adapter again"
        rows = whole.narrow(span.dim, span.start, span.size)
        parameter.narrow(span.dim, span.local, span.size).copy_(rows)
    return None
