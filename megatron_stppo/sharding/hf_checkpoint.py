"""Loads one rank's parameters from a Hugging Face folder, reading only the rows that this rank holds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_stppo.config import ConfigError
from megatron_stppo.sharding.hf_names import ModelShape, hf_shapes
from megatron_stppo.sharding.spans import hf_spans
from megatron_stppo.sharding.tiles import PADDING, Span, Spans

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@torch.no_grad()
def load_hf(
    folder: Path, spans: Spans, parameters: Mapping[str, Tensor], *, keep: Collection[str] = ()
) -> None:
    """Copy the rows that `spans` describe into `parameters`, in place, cast to each parameter's dtype.

    Padding rows are set to zero. `keep` names parameters that the checkpoint does not contain (a value head).
    Raises ConfigError, with the tensor's name, if a tensor is missing in the folder or has another shape.
    """
    unknown = (set(parameters) - set(keep)) ^ set(spans)
    assert not unknown, f"parameters and layout name different tensors: {sorted(unknown)}"
    with ExitStack() as stack:
        checkpoint = _Checkpoint(Path(folder), stack)
        for name, tensor_spans in spans.items():
            parameter = parameters[name]
            for span in tensor_spans:
                rows = parameter.narrow(span.dim, span.local, span.size)
                if span.hf_key == PADDING:
                    rows.zero_()
                else:
                    rows.copy_(checkpoint.read(span, tuple(rows.shape)))


def tensor_digests(folder: Path, shape: ModelShape, keys: Iterable[str]) -> list[str]:
    """Return a SHA-256 of each tensor's name, type, shape and bytes, in the order of `keys`.

    Raises ConfigError if a tensor is missing in the folder or has another shape than a model of this shape.
    """
    digests, spans = [], hf_spans(shape)
    with ExitStack() as stack:
        checkpoint = _Checkpoint(Path(folder), stack)
        for key in keys:
            size = hf_shapes(shape)[key]
            tensor = checkpoint.read(spans[key][0], size).contiguous()
            digest = hashlib.sha256(f"{key} {tensor.dtype} {tuple(size)}".encode())
            digest.update(tensor.view(torch.uint8).numpy().data)
            digests.append(digest.hexdigest())
    return digests


class _Checkpoint:
    """The safetensors files of a folder. Each is memory-mapped when its first tensor is read."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self._stack = folder, stack
        self._file_of = _weight_map(folder)
        self._open: dict[str, safe_open] = {}

    def read(self, span: Span, shape: tuple[int, ...]) -> Tensor:
        """Return the rows of a span, which must have this shape."""
        key, dim, start, size, _ = span
        if self._file_of is not None and key not in self._file_of:
            raise ConfigError(f"{self.folder}/{INDEX}: has no tensor {key!r}; the checkpoint is not complete")
        file = self._file(SINGLE if self._file_of is None else self._file_of[key])
        try:
            view: Any = file.get_slice(key)  # type: ignore[no-untyped-call]
        except SafetensorError:
            raise ConfigError(
                f"{self.folder}: has no tensor {key!r}; the checkpoint is not complete"
            ) from None
        held = view.get_shape()
        across = (held[:dim] + held[dim + 1 :], [*shape[:dim], *shape[dim + 1 :]])
        if across[0] != across[1] or held[dim] < start + size:
            raise ConfigError(
                f"{self.folder}: tensor {key!r} has shape {held}, config.json disagrees; correct it"
            )
        rows = slice(start, start + size)
        read: Tensor = view[rows] if dim == 0 else view[:, rows]
        return read

    def _file(self, name: str) -> safe_open:
        if name not in self._open:
            path = self.folder / name
            try:
                self._open[name] = self._stack.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"{path}: cannot be read ({error}); fetch the file again") from None
        return self._open[name]


def _weight_map(folder: Path) -> dict[str, str] | None:
    """Return {tensor: file name} for a checkpoint of several files, or None for a single file."""
    path = folder / INDEX
    if not path.exists():
        if not (folder / SINGLE).exists():
            raise ConfigError(
                f"{folder}: holds neither {SINGLE} nor {INDEX}; convert the weights to safetensors"
            )
        return None
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
