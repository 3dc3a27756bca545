"""The safetensors files of a Hugging Face folder: which tensor is in which file, and their types and shapes.

Some folders have other names than those of hf_names.py: the text model is a part of a model with images, or
one tensor holds the projections of all experts, in GPT-OSS transposed and with biases. `entries` has one
entry for each tensor of hf_names.py. Does not import torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from megatron_stppo.config import ConfigError
from megatron_stppo.weights.sharding.hf_names import VALUE, VALUE_BIAS, Head

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PIECE = 1 << 24  # bytes that are compared at once


TEXT = "model.language_model."  # prefix of the text model in a model with images
JOINED = re.compile(r"(model\.layers\.\d+\.mlp\.experts\.)(gate_up_proj|down_proj)(_bias)?")
# an expert's tensor that hf_names.py has for a part of such a tensor with biases
STACKED = re.compile(r"(model\.layers\.\d+\.mlp\.experts\.)\d+\.(gate_up|down)\.(weight|bias)")


class Entry(NamedTuple):
    """A tensor, which is the whole or a part of a file's tensor `key`.

    Example: Entry(Path("model.safetensors"), "BF16", (512, 2048), "model.layers.0.mlp.experts.gate_up_proj",
    (3, 512)) has the rows 512..1023 of the fourth expert's matrix.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    key: str
    part: tuple[int, int] | None = None  # index of the expert, and the first of its rows; None: the whole
    transposed: bool = False  # the file's tensor has the expert's columns before its rows


def _weight_map(folder: Path) -> dict[str, str] | None:
    """Return {tensor: file name} for a checkpoint of several files, or None for a single file.

    A folder with both has a single file for transformers, which does not read the index then.
    """
    path = folder / INDEX
    if (folder / SINGLE).exists():
        return None
    if not path.exists():
        raise ConfigError(f"{folder}: holds neither {SINGLE} nor {INDEX}; convert the weights to safetensors")
    try:
        files: dict[str, str] = dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read ({error!r}); fetch the file again") from None
    for name in files.values():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ConfigError(
                f"{path}: names a file outside the folder ({name!r}); fetch the checkpoint again"
            )
    return files


def entries(folder: Path) -> dict[str, Entry]:
    """Return {name: entry} of every tensor in the folder's files; the tensors themselves are not read.

    Raises ConfigError if a file cannot be read or the index is wrong.
    """
    named = _weight_map(folder)
    given: list[Entry] = []
    for name in [SINGLE] if named is None else sorted(set(named.values())):
        path = folder / name
        try:
            with safe_open(path, framework="numpy") as file:
                for key in file.keys():
                    if named is not None and named.get(key) != name:
                        raise ConfigError(
                            f"{path}: holds the tensor {key!r}, which {INDEX} does not list for this "
                            "file; fetch both again"
                        )
                    view = file.get_slice(key)
                    given.append(Entry(path, view.get_dtype(), tuple(view.get_shape()), key))
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path}: cannot be read ({error}); fetch the file again") from None
    present = {entry.key for entry in given}
    absent = sorted(named.keys() - present) if named is not None else []
    if absent:
        raise ConfigError(f"{folder}: no file has the tensor {absent[0]!r} of {INDEX}; fetch both again")
    biased = any(key.endswith(".experts.gate_up_proj_bias") for key in present)
    return {name: of for entry in given for name, of in _named(entry, biased).items()}


def _named(entry: Entry, biased: bool) -> dict[str, Entry]:
    """Return the tensors of hf_names.py that a file's tensor holds; under its own name if there are none.

    biased: whether the folder's experts have biases. Then each is [columns, rows], gate and up in turn.
    """
    name = entry.key.replace(TEXT, "model.", 1) if entry.key.startswith(TEXT) else entry.key
    joined = JOINED.fullmatch(name)
    if joined is None or len(entry.shape) != (2 if joined[3] else 3):
        return {name: entry}
    if biased:
        kind, shape = "bias" if joined[3] else "weight", entry.shape[:0:-1]
        return {
            f"{joined[1]}{expert}.{joined[2].removesuffix('_proj')}.{kind}": entry._replace(
                shape=shape, part=(expert, 0), transposed=joined[3] is None
            )
            for expert in range(entry.shape[0])
        }
    experts, rows, columns = entry.shape
    linears = ("gate_proj", "up_proj") if joined[2] == "gate_up_proj" else ("down_proj",)
    each = rows // len(linears)
    return {
        f"{joined[1]}{expert}.{linear}.weight": entry._replace(shape=(each, columns), part=(expert, n * each))
        for expert in range(experts)
        for n, linear in enumerate(linears)
    }


def stack_of(name: str) -> str:
    """Return the file's tensor that holds a tensor of hf_names.py; `name` itself unless experts have biases.

    Example: model.layers.0.mlp.experts.gate_up_proj_bias holds model.layers.0.mlp.experts.3.gate_up.bias.
    """
    found = STACKED.fullmatch(name)
    return f"{found[1]}{found[2]}_proj{'_bias' * (found[3] == 'bias')}" if found else name


def head_of_critic(folder: Path) -> Head:
    """Return "value" if the folder has the value head that `cold-start --critic` writes, else "none"."""
    given = entries(folder)
    shapes = [given[key].shape[:1] for key in (VALUE, VALUE_BIAS) if key in given]
    return "value" if shapes == [(1,), (1,)] else "none"


def same_bytes(first: Entry, second: Entry) -> bool:
    """Return whether two whole tensors have the same type, shape and bytes."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    pairs = zip(_pieces(first.path, first.key), _pieces(second.path, second.key), strict=True)
    return all(a == b for a, b in pairs)


def _pieces(path: Path, key: str) -> Iterator[bytes]:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        begin, end = json.loads(file.read(size))[key]["data_offsets"]
        file.seek(8 + size + begin)
        for done in range(0, end - begin, PIECE):
            yield file.read(min(PIECE, end - begin - done))
