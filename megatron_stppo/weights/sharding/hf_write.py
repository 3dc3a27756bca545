"""Writes the files of weights of a Hugging Face folder."""

import errno
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_stppo.weights.sharding.hf_files import INDEX, SINGLE
from megatron_stppo.weights.sharding.hf_names import ModelShape

Shapes = Mapping[str, tuple[int, ...]]  # of hf_shapes
FILE_BYTES = 5 * 10**9  # approximate size of a file of weights


def type_of(shape: ModelShape, name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the type of a tensor, or of megatron's parameter, in a model of type `dtype`."""
    return torch.promote_types(dtype, torch.float32) if name.endswith(shape.float32) else dtype


def stacks(shape: ModelShape, names: Iterable[str]) -> dict[str, list[str]]:
    """Return {tensor of a file: the tensors of hf_shapes that it holds}, in order."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(shape.stored(name), []).append(name)
    return found


def as_stored(shape: ModelShape, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a file (ModelShape.stored)."""
    return {
        stored: torch.stack([tensors[name].t() for name in names])
        if shape.is_stack(stored)
        else tensors[names[0]]
        for stored, names in stacks(shape, tensors).items()
    }


def by_file(
    shape: ModelShape, shapes: Shapes, dtype: torch.dtype, limit: int = FILE_BYTES
) -> dict[str, list[str]]:
    """Return {file name: its tensors}, in the order of `shapes`, with up to `limit` bytes per file.

    Those of one stack are in one file."""
    groups: list[list[str]] = [[]]
    size = 0
    for keys in stacks(shape, shapes).values():
        bytes_ = sum(_bytes(shape, key, shapes[key], dtype) for key in keys)
        if groups[-1] and size + bytes_ > limit:
            groups.append([])
            size = 0
        groups[-1] += keys
        size += bytes_
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": keys for i, keys in enumerate(groups, 1)}


def _bytes(shape: ModelShape, key: str, size: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(size).numel() * type_of(shape, key, dtype).itemsize


def write_tensors(
    tensors: dict[str, Tensor], path: Path, like: Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write one file of tensors with the mode of the file `like`; safetensors would give it mode 0600."""
    save_file(tensors, path, {"format": "pt"} | dict(metadata or {}))
    path.chmod(like.stat().st_mode & 0o777)


def finish(
    folder: Path,
    partial: Path,
    shape: ModelShape,
    files: Mapping[str, list[str]],
    shapes: Shapes,
    dtype: torch.dtype,
) -> None:
    if len(files) > 1:
        total = sum(_bytes(shape, key, size, dtype) for key, size in shapes.items())
        weight_map = {shape.stored(key): name for name, keys in files.items() for key in keys}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (partial / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    publish(partial, folder)


def publish(partial: Path, folder: Path) -> None:
    """Rename a complete folder into place, after its files are on the disk. Raises OSError if it is taken."""
    for path in filter(Path.is_file, partial.rglob("*")):
        with path.open("rb") as file:
            os.fsync(file.fileno())  # a rename may reach the disk before the data it names
    if folder.exists():  # a rename would replace an empty folder
        raise FileExistsError(errno.EEXIST, "has appeared meanwhile", str(folder))
    partial.rename(folder)
