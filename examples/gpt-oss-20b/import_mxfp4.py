"""Write weights that are published in MXFP4 in bfloat16, as a folder which model.path accepts.

    python examples/gpt-oss-20b/import_mxfp4.py SOURCE FOLDER

The weights of one file of the new folder are in memory at once.

In MXFP4 (Open Compute Project, "Microscaling Formats", version 1.0) 32 numbers of a row share one scale, a
power of two. A number has 4 bits: a sign, two bits of the exponent and one of the mantissa.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from rich.progress import track
from safetensors import safe_open
from torch import Tensor

from megatron_stppo.base.errors import ConfigError, Ending
from megatron_stppo.base.files import scratch_folder
from megatron_stppo.base.printing import say
from megatron_stppo.weights.sharding.hf_files import in_files
from megatron_stppo.weights.sharding.hf_names import ModelShape, hf_shapes, read_shape
from megatron_stppo.weights.sharding.hf_write import by_file, finish, stacks, write_tensors

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the low three bits; the fourth is the sign
BIAS = 127  # of the exponent that a scale has
QUANTISED = ("_blocks", "_scales")
Shown = Callable[[Sequence[str]], Iterable[str]]  # what the names of the tensors pass through, a progress bar


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, metavar="SOURCE", help="folder of a model in MXFP4")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="new folder to write")
    arguments = parser.parse_args(argv)
    folder = arguments.folder
    try:
        shape = import_mxfp4(arguments.source, folder, lambda names: track(names, "decoding"))
    except Ending as error:
        say(str(error))
        return error.exit_code
    say(f"wrote {folder}: {shape.family}, {shape.layers} layers, {shape.vocab} tokens, bfloat16")
    return 0


def import_mxfp4(source: Path, folder: Path, shown: Shown = list) -> ModelShape:
    """Write the model in `source` to a new `folder` in bfloat16, with the tokenizer and all other files.

    The folder is renamed into place when it is complete. Returns the model's shape.
    Raises ConfigError if `source` is no such model, or a tensor is missing or has another shape.
    """
    with scratch_folder("FOLDER", folder) as partial:
        shape = _without_weights(source, partial)
        shapes, paths = hf_shapes(shape), {entry.key: entry.path for entry in in_files(source)}
        files = by_file(shape, shapes, torch.bfloat16)
        for name, keys in files.items():
            tensors = {}
            for stored in shown([*stacks(shape, keys)]):
                tensors[stored] = _tensor(source, stored, paths)
                one, *_ = names = stacks(shape, keys)[stored]
                size = (len(names), *reversed(shapes[one])) if shape.is_stack(stored) else shapes[one]
                if tensors[stored].shape != size:
                    raise ConfigError(
                        f"{source}: tensor {stored!r} has shape {[*tensors[stored].shape]}, its config.json "
                        f"gives {[*size]}; fetch the folder again"
                    )
            write_tensors(tensors, partial / name, partial / "config.json")
        finish(folder, partial, shape, files, shapes, torch.bfloat16)
    return shape


def _without_weights(source: Path, partial: Path) -> ModelShape:
    """Copy what has no weights; return the shape of the model."""
    try:
        fields = json.loads((source / "config.json").read_text(encoding="utf-8"))
        method = fields["quantization_config"]["quant_method"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{source}: config.json with quantization_config.quant_method=mxfp4 is needed ({error!r}); give "
            "the folder of the published model"
        ) from None
    if method != "mxfp4" or fields.get("model_type") != "gpt_oss":
        raise ConfigError(
            f"{source}: model_type={fields.get('model_type')!r} with quant_method={method!r} is not "
            f"supported; give a folder of gpt_oss in mxfp4"
        )
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.startswith(".") and ".safetensors" not in path.name:
            shutil.copyfile(path, partial / path.name)
    kept = {name: value for name, value in fields.items() if name != "quantization_config"}
    kept = {name: value for name, value in kept.items() if name != "torch_dtype"} | {"dtype": "bfloat16"}
    (partial / "config.json").write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    return read_shape(partial)


def _tensor(source: Path, stored: str, paths: Mapping[str, Path]) -> Tensor:
    """Return a tensor in bfloat16, decoded if the files have its numbers and scales."""

    def read(key: str) -> Tensor:
        if key not in paths:
            raise ConfigError(f"{source}: no file has the tensor {key!r}; fetch the folder again")
        with safe_open(paths[key], framework="pt") as file:
            tensor: Tensor = file.get_tensor(key)
        return tensor

    if stored + QUANTISED[0] not in paths:
        return read(stored).to(torch.bfloat16)
    blocks, scales = (read(stored + suffix) for suffix in QUANTISED)
    fits = blocks.ndim == 4 and len(blocks) and blocks.shape == (*scales.shape, 16)
    if not fits or blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise ConfigError(
            f"{source}: tensor {stored + QUANTISED[0]!r} does not fit its scales; fetch the folder again"
        )
    tensor = torch.stack([decoded(*of).t() for of in zip(blocks, scales, strict=True)])
    if not tensor.isfinite().all():
        raise ConfigError(
            f"{source}: tensor {stored + QUANTISED[1]!r} has scales above 252; fetch the folder again"
        )
    return tensor


def decoded(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return bfloat16 [rows, 32 G] of uint8 blocks [rows, G, 16] and scales [rows, G].

    A byte has two numbers, the first in its low bits. The result is exact, and infinite for scales above
    252 with large numbers.
    """
    table = torch.tensor([*MAGNITUDES, *(-x for x in MAGNITUDES)])
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
    exponents = scales.to(torch.int32)[..., None] - BIAS
    return torch.ldexp(table[codes.int()], exponents).flatten(-2).to(torch.bfloat16)


if __name__ == "__main__":
    sys.exit(main())
