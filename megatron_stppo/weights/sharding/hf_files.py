"""The safetensors files of a Hugging Face folder: which tensor is in which file, and their types and shapes.

Does not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from megatron_stppo.config import ConfigError
from megatron_stppo.weights.sharding.hf_names import VALUE, VALUE_BIAS, Head

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PIECE = 1 << 24  # bytes that are compared at once


class Entry(NamedTuple):
    """A tensor of a file. Example: Entry(Path("m/model.safetensors"), "BF16", (151936, 896))."""

    path: Path
    dtype: str
    shape: tuple[int, ...]


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
        files: dict[str, str] = dict(json.loads(path.read_text())["weight_map"])
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
    found: dict[str, Entry] = {}
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
                    found[key] = Entry(path, view.get_dtype(), tuple(view.get_shape()))
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path}: cannot be read ({error}); fetch the file again") from None
    absent = sorted(named.keys() - found.keys()) if named is not None else []
    if absent:
        raise ConfigError(f"{folder}: no file has the tensor {absent[0]!r} of {INDEX}; fetch both again")
    return found


def head_of_critic(folder: Path) -> Head:
    """Return "value" if the folder has the value head that `cold-start --critic` writes, else "none"."""
    given = entries(folder)
    shapes = [given[key].shape[:1] for key in (VALUE, VALUE_BIAS) if key in given]
    return "value" if shapes == [(1,), (1,)] else "none"


def same_bytes(first: tuple[str, Entry], second: tuple[str, Entry]) -> bool:
    """Return whether two tensors, given by name and entry, have the same type, shape and bytes."""
    if first[1][1:] != second[1][1:]:
        return False
    pairs = zip(_pieces(first[1].path, first[0]), _pieces(second[1].path, second[0]), strict=True)
    return all(a == b for a, b in pairs)


def _pieces(path: Path, key: str) -> Iterator[bytes]:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        begin, end = json.loads(file.read(size))[key]["data_offsets"]
        file.seek(8 + size + begin)
        for done in range(0, end - begin, PIECE):
            yield file.read(min(PIECE, end - begin - done))
