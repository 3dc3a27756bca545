"""The safetensors files of a Hugging Face folder: which tensor is in which file, and their types and shapes.

Some folders have other names than those of hf_names.py: one tensor may hold the projections of all experts,
or the text model is a part of a model with images (ModelShape.held). Does not import torch.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

from megatron_stppo.config import ConfigError
from megatron_stppo.weights.sharding.hf_names import VALUE, VALUE_BIAS, Head, ModelShape
from megatron_stppo.weights.sharding.tiles import Entry

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PIECE = 1 << 24  # bytes that are compared at once


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


def entries(folder: Path, shape: ModelShape) -> dict[str, Entry]:
    """Return {name: entry} of every tensor of hf_names.py in the folder's files."""
    return {name: of for entry in in_files(folder) for name, of in shape.held(entry).items()}


def in_files(folder: Path) -> list[Entry]:
    """Return every tensor in the folder's files; the tensors themselves are not read.

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
    return given


def head_of_critic(folder: Path) -> Head:
    """Return "value" if the folder has the value head that `cold-start --critic` writes, else "none"."""
    given = {entry.key: entry.shape for entry in in_files(folder)}
    shapes = [given[key][:1] for key in (VALUE, VALUE_BIAS) if key in given]
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
