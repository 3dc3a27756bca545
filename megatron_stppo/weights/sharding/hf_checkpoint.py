"""Loads one rank's parameters from a Hugging Face folder, reading only the rows that this rank holds; and its
adapters from a folder of the package `peft`."""

import functools
import hashlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_stppo.config import ConfigError
from megatron_stppo.config.peft_folder import DIGEST, PREFIX, TENSORS, read_folder
from megatron_stppo.parallel.collectives import first, gather_records, raise_together
from megatron_stppo.weights.sharding.hf_files import entries
from megatron_stppo.weights.sharding.hf_names import Head, ModelShape, hf_shapes
from megatron_stppo.weights.sharding.low_rank import fill
from megatron_stppo.weights.sharding.spans import whole_spans
from megatron_stppo.weights.sharding.tiles import PADDING, Span, Spans


@torch.no_grad()
def load_hf(
    folder: Path,
    shape: ModelShape,
    spans: Spans,
    parameters: Mapping[str, Tensor],
    *,
    keep: Collection[str] = (),
) -> None:
    """Copy the rows that `spans` describe into `parameters`, in place, cast to each parameter's dtype.

    Padding rows are set to zero. `keep` names parameters that the checkpoint does not contain (a value head).
    Raises ConfigError, with the tensor's name, if a tensor is missing in the folder, has another shape, or
    has NaN or infinity.
    """
    read: list[tuple[str, Tensor]] = []  # names, and the smallest and largest value
    unknown = (set(parameters) - set(keep)) ^ set(spans)
    assert not unknown, f"parameters and layout name different tensors: {sorted(unknown)}"
    with ExitStack() as stack:
        checkpoint = _Checkpoint(Path(folder), shape, stack)
        for name, tensor_spans in spans.items():
            parameter = parameters[name]
            for span in tensor_spans:
                rows = parameter.narrow(span.dim, span.local, span.size)
                if span.hf_key == PADDING:
                    rows.zero_()
                else:
                    rows.copy_(checkpoint.read(span, tuple(rows.shape)))
                    read.append((span.hf_key, torch.stack(rows.aminmax())))
    _check_finite(folder, read)


def _check_finite(folder: Path, read: Sequence[tuple[str, Tensor]]) -> None:
    """Raise ConfigError for a tensor with NaN or infinity. The host waits for the device once."""
    finite = torch.stack([range_ for _, range_ in read]).isfinite().all(1).tolist() if read else []
    if not all(finite):
        raise ConfigError(
            f"{folder}: tensor {read[finite.index(False)][0]!r} has NaN or infinity; fetch the folder again, "
            "or give an earlier model"
        )


@functools.cache
def weights_digest(folder: Path, shape: ModelShape, head: Head = "vocabulary") -> str:
    """Return 64 hexadecimal digits: a hash of names, types, shapes and bytes of a folder's tensors. It
    identifies the weights that a run begins with, and that adapters belong to.

    Collective. It depends neither on the division into files nor on the number of ranks. The result is kept,
    because the weights are read only once. Raises ConfigError if a tensor is missing in the folder or has
    another shape than in a model of this shape.
    """
    digests, shapes = [], hf_shapes(shape, head)
    spans = whole_spans(shape, shapes)
    with ExitStack() as stack:
        checkpoint = _Checkpoint(Path(folder), shape, stack)
        for key in sorted(shapes)[dist.get_rank() :: dist.get_world_size()]:
            tensor = checkpoint.read(spans[key][0], shapes[key]).contiguous()
            digest = hashlib.sha256(f"{key} {tensor.dtype} {tuple(shapes[key])}".encode())
            digest.update(tensor.view(torch.uint8).numpy().data)
            digests.append(digest.hexdigest())
    every = sorted(digest for (of_rank,) in gather_records([digests], list[str]) for digest in of_rank)
    return hashlib.sha256("".join(every).encode()).hexdigest()


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
                fill(parameter, of_parameter, functools.partial(_finite, file, parameter.dtype))
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


class _Checkpoint:
    """The safetensors files of a folder. Each is memory-mapped when its first tensor is read."""

    def __init__(self, folder: Path, shape: ModelShape, stack: ExitStack) -> None:
        self.folder, self._stack = folder, stack
        self._entries = entries(folder, shape)
        self._open: dict[Path, Any] = {}

    def read(self, span: Span, shape: tuple[int, ...]) -> Tensor:
        """Return the rows of a span, which must have this shape."""
        key, dim, start, size, _ = span
        if key not in self._entries:
            raise ConfigError(f"{self.folder}: has no tensor {key!r}; the checkpoint is not complete")
        path, _, held, stored, part, transposed = self._entries[key]
        across = (held[:dim] + held[dim + 1 :], shape[:dim] + shape[dim + 1 :])
        if across[0] != across[1] or held[dim] < start + size:
            raise ConfigError(
                f"{self.folder}: tensor {key!r} has shape {[*held]}, config.json disagrees; correct it"
            )
        if path not in self._open:
            self._open[path] = self._stack.enter_context(safe_open(path, framework="pt"))
        view, rows = self._open[path].get_slice(stored), slice(start, start + size)
        if part is not None and transposed:
            turned: Tensor = view[part[0], :, rows] if dim == 0 else view[part[0], rows]
            return turned.t()
        if part is not None:  # of an expert, in a tensor with those of all
            expert, first = part
            own = slice(first, first + held[0])
            rows = slice(first + start, first + start + size) if dim == 0 else rows
            of_expert: Tensor = view[expert, rows] if dim == 0 else view[expert, own, rows]
            return of_expert
        read: Tensor = view[rows] if dim == 0 else view[:, rows]
        return read
