"""Writes a trained model as a Hugging Face folder. (The way in is sharding/hf_checkpoint.py: load_hf.)

The reshard's own planner does it: the target is the checkpoint itself, on rank 0, a file's worth at a time.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from megatron_stppo.checkpoint import saving as checkpoints
from megatron_stppo.config import Config, ConfigError
from megatron_stppo.launch import process
from megatron_stppo.model import build
from megatron_stppo.model.layers import layer_spec
from megatron_stppo.parallel.collectives import broadcast_bytes
from megatron_stppo.reshard.resharder import Resharder
from megatron_stppo.sharding.hf_checkpoint import INDEX, SINGLE
from megatron_stppo.sharding.hf_names import ModelShape, hf_shapes, read_shape
from megatron_stppo.sharding.spans import hf_spans, row_widths, training_layouts
from megatron_stppo.sharding.tiles import Spans

WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf")
FILE_BYTES = 5 * 10**9  # about what a file of weights holds


def export_hf(
    folder: Path,
    parameters: Mapping[str, Tensor],
    layouts: Mapping[int, Spans],
    shape: ModelShape,
    template: Path,
    *,
    overwrite: bool = False,
    file_bytes: int = FILE_BYTES,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Gathers this rank's `parameters` with all others' into `folder`. Collective over `group`.

    config.json and the tokenizer come from `template`; the weights keep the parameters' type, which
    config.json then names. Rank 0 holds at most `file_bytes` (or the largest tensor) at once. The folder
    appears whole or not at all. Raises ConfigError, on all ranks, if it exists and `overwrite` is not given,
    or if it cannot be written; ReshardError if rows were lost on the way.
    """
    folder = Path(folder)
    partial = folder.with_name(f".{folder.name}.partial")
    dtype = next(iter(parameters.values())).dtype
    _on_first(group, lambda: _begin(folder, partial, Path(template), dtype, overwrite))
    files = by_file(shape, dtype.itemsize, file_bytes)
    for name, keys in files.items():
        whole = gather(parameters, layouts, shape, keys, group)
        _on_first(group, functools.partial(_write, whole, partial / name))
    _on_first(group, lambda: _finish(folder, partial, files, shape, dtype.itemsize))


def gather(
    parameters: Mapping[str, Tensor],
    layouts: Mapping[int, Spans],
    shape: ModelShape,
    keys: Sequence[str],
    group: dist.ProcessGroup | None = None,
) -> dict[str, Tensor]:
    """{hf_key: whole tensor} on the host of rank 0, nothing elsewhere; of the parameters' type. Collective.

    They are put together on the parameters' device, which must have room for all of `keys`.
    """
    some, spans, shapes = next(iter(parameters.values())), hf_spans(shape), hf_shapes(shape)
    mine = keys if dist.get_rank(group) == 0 else ()
    whole = {key: torch.empty(shapes[key], dtype=some.dtype, device=some.device) for key in mine}
    target_layouts = {0: {key: spans[key] for key in keys}}
    Resharder(parameters, whole, layouts, target_layouts, row_widths(shape), group=group).sync(0)
    return {key: tensor.cpu() for key, tensor in whole.items()}


def by_file(shape: ModelShape, itemsize: int, limit: int = FILE_BYTES) -> dict[str, list[str]]:
    """{file name: its tensors}, filled in checkpoint order up to `limit` bytes each."""
    groups: list[list[str]] = [[]]
    size = 0
    for key, dims in hf_shapes(shape).items():
        bytes_ = torch.Size(dims).numel() * itemsize
        if groups[-1] and size + bytes_ > limit:
            groups.append([])
            size = 0
        groups[-1].append(key)
        size += bytes_
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": keys for i, keys in enumerate(groups, 1)}


def _begin(folder: Path, partial: Path, template: Path, dtype: torch.dtype, overwrite: bool) -> None:
    if folder.exists() and not overwrite:
        raise ConfigError(f"output={folder}: exists; name a new folder, or remove it")
    shutil.rmtree(partial, ignore_errors=True)  # what an interrupted export left
    partial.mkdir(parents=True)
    for path in sorted(template.iterdir()):
        if path.is_file() and not path.name.startswith(".") and not path.name.endswith(WEIGHTS):
            shutil.copyfile(path, partial / path.name)
    config = json.loads((partial / "config.json").read_text())
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(dtype).removeprefix("torch.")
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _write(tensors: dict[str, Tensor], path: Path) -> None:
    """Write one file of weights. safetensors gives it mode 0600; config.json beside it has the umask's."""
    save_file(tensors, path, {"format": "pt"})
    path.chmod(path.with_name("config.json").stat().st_mode & 0o777)


def _finish(
    folder: Path, partial: Path, files: Mapping[str, list[str]], shape: ModelShape, itemsize: int
) -> None:
    if len(files) > 1:
        total = sum(torch.Size(dims).numel() for dims in hf_shapes(shape).values()) * itemsize
        weight_map = {key: name for name, keys in files.items() for key in keys}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (partial / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    for path in partial.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())  # a rename may reach the disk before the data it names
    replaced = folder.with_name(f".{folder.name}.replaced")
    if folder.exists():
        folder.rename(replaced)
    partial.rename(folder)
    shutil.rmtree(replaced, ignore_errors=True)


def _on_first(group: dist.ProcessGroup | None, write: Callable[[], None]) -> None:
    """Runs `write` on rank 0; what it cannot write is a ConfigError on all ranks."""
    problem = b""
    if dist.get_rank(group) == 0:
        try:
            write()
        except (OSError, ValueError) as error:  # the other ranks must hear of it, or they would wait
            problem = str(error).encode()
    problem = broadcast_bytes(problem, 0, group)
    if problem:
        raise ConfigError(problem.decode())


def to_hf(config: Config, checkpoint: str, output: Path) -> None:
    """Write the actor of a run's checkpoint ("step_N" or "latest") as a Hugging Face folder, and print one
    line that says what was written. Collective. Raises ConfigError and CheckpointError."""
    mesh, shape = process.start(config), read_shape(config.model.path)
    model = build.build("actor", shape, config, mesh, process.dtype(config))
    folder = config.run.folder / "checkpoints"
    state = checkpoints.load_weights(folder, "actor", model, checkpoints.step_of(checkpoint))
    layouts = training_layouts(shape, mesh.layout, spec=layer_spec(config))
    export_hf(output, build.named_parameters(model), layouts, shape, config.model.path)
    if mesh.rank == 0:
        step = folder / f"step_{state['iteration']}"
        size = _size(shape, process.dtype(config))
        print(f"wrote {output}: {size}; actor of {step}, tokenizer of {config.model.path}")
    process.stop()


def _size(shape: ModelShape, dtype: torch.dtype) -> str:
    """Example: "0.9 M parameters, float32, 3.6 MB"."""
    count = sum(torch.Size(dims).numel() for dims in hf_shapes(shape).values())
    name = str(dtype).removeprefix("torch.")
    return f"{count / 1e6:,.1f} M parameters, {name}, {count * dtype.itemsize / 1e6:,.1f} MB"


def to_megatron(config: Config, output: Path) -> None:
    """Write model.path as step_0 of a new checkpoints folder, with fresh optimizers: a run resumes from it.
    Print one line that says what was written. Collective.

    Raises ConfigError if the folder holds anything.
    """
    if output.exists() and any(output.iterdir()):
        raise ConfigError(f"output={output}: is not empty; name a new folder")
    mesh, shape = process.start(config), read_shape(config.model.path)
    roles = ("actor", "critic") if config.needs_critic else ("actor",)
    trainers = {role: build.trainer(role, shape, config, mesh, process.dtype(config)) for role in roles}
    saver = checkpoints.Saver(output, config, mesh.layout)
    saver.save(0, trainers, {"iteration": 0})
    saver.finish()
    if mesh.rank == 0:
        print(f"wrote {output / 'step_0'}: {' and '.join(roles)} of {config.model.path}, new optimizers")
    process.stop()
