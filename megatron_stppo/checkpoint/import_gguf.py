"""The command `import-gguf`: writes a Hugging Face folder from a GGUF file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from megatron_stppo.base.files import make_scratch
from megatron_stppo.weights.gguf.header import Header
from megatron_stppo.weights.gguf.tensors import Origin, decode, sources
from megatron_stppo.weights.gguf.tokenizer import write_tokenizer
from megatron_stppo.weights.sharding.hf_names import ModelShape, hf_shapes, read_shape
from megatron_stppo.weights.sharding.hf_write import by_file, finish, write_tensors

Shown = Callable[[Sequence[str]], Iterable[str]]


def import_gguf(file: Path, folder: Path, dtype: torch.dtype, shown: Shown = list) -> ModelShape:
    """Write config.json, tokenizer, chat template, end tokens and weights of `file` to a new `folder`.

    The weights of one file of the folder are in memory at once. The folder is renamed into place when it is
    complete. Returns the model's shape. shown: what the names of the tensors pass through, a progress bar.
    Raises ConfigError for a file that is damaged or not supported, before any weight is decoded.
    """
    partial = make_scratch("FOLDER", folder)
    try:
        header = Header(file)
        fields = header.config() | {"dtype": str(dtype).removeprefix("torch.")}
        (partial / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        shape = read_shape(partial)
        found = _matched(header, shape)
        write_tokenizer(header, partial)
        ids = {
            f"{name}_token_id": header.values.get(f"tokenizer.ggml.{name}_token_id")
            for name in ("bos", "eos")
        }
        turn = header.values.get(
            "tokenizer.ggml.eot_token_id", ids["eos_token_id"]
        )  # a turn's end, if another
        if turn != ids["eos_token_id"]:
            ids["eos_token_id"] = [ids["eos_token_id"], turn]
        (partial / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n", encoding="utf-8")
        shapes = hf_shapes(shape)
        files = by_file(shape, shapes, dtype)
        for name, keys in files.items():
            tensors = {key: decode(found[key], dtype) for key in shown(keys)}
            write_tensors(tensors, partial / name, partial / "config.json")
        finish(folder, partial, shape, files, shapes, dtype)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return shape


def _matched(header: Header, shape: ModelShape) -> dict[str, Origin]:
    """Return the sources of exactly the tensors of a model of this shape."""
    found, expected = sources(header, shape), hf_shapes(shape)
    for name in sorted(found.keys() ^ expected.keys()):
        raise header.refusal(f"has {'a' if name in found else 'no'} tensor {name}, unlike its metadata")
    for name, (tensor, expert, _) in found.items():
        held = tuple(reversed(tensor.shape.tolist()))[expert is not None :]
        if held != expected[name]:
            raise header.refusal(
                f"tensor {tensor.name} has the shape {list(held)}, not {list(expected[name])}"
            )
    return found
