"""Checkpoints in megatron's distributed format, published atomically.

A step is written to step_N.tmp-ATTEMPT/, every file is flushed to disk, MANIFEST.json (sha256 and size of
each file) comes last, then one rename makes the step visible and LATEST is replaced. Before that rename
nothing of an older step is touched.

All random numbers of a run are functions of (seed, iteration), so a checkpoint holds no random state and
cannot lose any.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.transformer.module import MegatronModule

from megatron_stppo.config import ConfigError
from megatron_stppo.model.mlp_spans import LayerSpec
from megatron_stppo.model.optimizer import Trainer
from megatron_stppo.parallel.collectives import broadcast_bytes

# Every optimizer state in the shape of its parameter: loadable under another data-parallel size.
SHARDING = {"distrib_optim_sharding_type": "fully_reshardable"}
STEP = re.compile(r"^step_(\d+)$")
STATE, MANIFEST, LATEST = "state.json", "MANIFEST.json", "LATEST"


class CheckpointError(RuntimeError):
    """No checkpoint can be read; the message says which were tried and why each was refused."""


def save(folder: Path, step: int, trainers: dict[str, Trainer], state: dict[str, Any], keep: int) -> Path:
    """Writes and publishes step_`step`; collective. `state` is the loop's own, JSON. Keeps the newest `keep`
    steps."""
    final = folder / f"step_{step}"
    scratch = folder / f"step_{step}.tmp-{os.environ.get('SLURM_RESTART_COUNT', '0')}"
    if dist.get_rank() == 0:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
    dist.barrier()
    for role, trainer in trainers.items():
        part = scratch / role
        if dist.get_rank() == 0:
            part.mkdir()
        dist.barrier()
        dist_checkpointing.save(_tensors(trainer, is_loading=False), str(part))
    if dist.get_rank() == 0:
        chunks = next(iter(trainers.values())).chunks
        made_of = {"layers": layers_of(chunks), "expert": expert_size(chunks)}
        (scratch / STATE).write_text(json.dumps(state | {"trainers": _counters(trainers)} | made_of))
        _publish(scratch, final)
        _retire(folder, step, keep)
    dist.barrier()
    return final


def load(folder: Path, trainers: dict[str, Trainer], step: int | None = None) -> dict[str, Any] | None:
    """Fills the trainers from `step`, or the newest readable one; returns the loop's state, None without any.

    Collective; rank 0 chooses. Raises CheckpointError if steps exist but none can be trusted.
    """
    path = _agree(folder, step)
    if path is None:
        return None
    state = json.loads((path / STATE).read_text())
    for role, trainer in trainers.items():
        _check_layers(path, state, trainer.chunks)
        _check_experts(path, state, trainer.chunks)
        if role not in state["trainers"]:
            raise ConfigError(f"{path}: holds no {role}; its run had none, start a new run")
        loaded = dist_checkpointing.load(_tensors(trainer, is_loading=True), str(path / role))
        _fill(trainer.chunks, loaded["model"])
        trainer.restore(loaded["optimizer"], *state["trainers"][role])
    return state


def load_weights(
    folder: Path, role: str, model: Sequence[MegatronModule], step: int | None = None
) -> dict[str, Any]:
    """Fills a model's chunks from `step`, or the newest readable one; returns the loop's state. Collective.

    Raises CheckpointError if there is none that can be trusted.
    """
    path = _agree(folder, step)
    if path is None:
        raise CheckpointError(f"{folder}: holds no checkpoint; train first, or leave the checkpoint out")
    state = json.loads((path / STATE).read_text())
    _check_layers(path, state, model)
    loaded = dist_checkpointing.load({"model": _sharded(model)}, str(path / role))
    _fill(model, loaded["model"])
    return dict(state)


def _sharded(model: Sequence[MegatronModule]) -> dict[str, Any]:
    """Every chunk's tensors. Their names in the files are those of the whole model, whoever holds them."""
    return {f"chunk_{number}": chunk.sharded_state_dict() for number, chunk in enumerate(model)}


def _fill(model: Sequence[MegatronModule], loaded: dict[str, Any]) -> None:
    for number, chunk in enumerate(model):
        chunk.load_state_dict(loaded[f"chunk_{number}"])


def layers_of(model: Sequence[torch.nn.Module]) -> LayerSpec:
    """What a model's layers are made of, as its parameters' names tell."""
    names = [name for chunk in model for name, _ in chunk.named_parameters()]
    fused = any(name.endswith("linear_qkv.layer_norm_weight") for name in names)
    return "transformer_engine" if fused else "local"


def _check_layers(path: Path, state: dict[str, Any], model: Sequence[torch.nn.Module]) -> None:
    if state["layers"] != layers_of(model):
        raise ConfigError(
            f"{path}: was written with model.layers={state['layers']}, this run has {layers_of(model)}; set "
            f"model.layers={state['layers']}, or go over a Hugging Face folder with `convert to-hf`"
        )


def expert_size(model: Sequence[MegatronModule]) -> int:
    """How many ranks share a layer's experts."""
    return int(model[0].config.expert_model_parallel_size)


def _check_experts(path: Path, state: dict[str, Any], model: Sequence[MegatronModule]) -> None:
    # Parameters that are not on all data-parallel ranks have an optimizer of their own.
    written, here = state["expert"], expert_size(model)
    if (written > 1) != (here > 1):
        raise ConfigError(
            f"{path}: was written with parallel.expert={written}, whose optimizer state does not fit "
            f"parallel.expert={here}; set parallel.expert={written}, or go over a Hugging Face folder with "
            "`convert to-hf`"
        )


def step_of(text: str) -> int | None:
    """The step that "step_12" names; None for "latest". Raises ConfigError."""
    if text == "latest":
        return None
    match = STEP.match(text)
    if match is None:
        raise ConfigError(f"checkpoint={text!r}: give step_N, as the folder is called, or latest")
    return int(match[1])


def _agree(folder: Path, step: int | None) -> Path | None:
    """Rank 0's choice of a step, on every rank."""
    choice = _choose(folder, step) if dist.get_rank() == 0 else None
    path, reason = json.loads(broadcast_bytes(json.dumps(choice).encode(), source=0))
    if path is None and reason:
        raise CheckpointError(reason)
    return None if path is None else Path(path)


def _tensors(trainer: Trainer, is_loading: bool) -> dict[str, Any]:
    model = _sharded(trainer.chunks)
    optimizer = trainer.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=SHARDING)
    return {"model": model, "optimizer": optimizer}


def _counters(trainers: dict[str, Trainer]) -> dict[str, tuple[int, int, int]]:
    return {role: (trainer.updates, trainer.skipped, trainer.warmup) for role, trainer in trainers.items()}


def _publish(scratch: Path, final: Path) -> None:
    files = sorted(p for p in scratch.rglob("*") if p.is_file())
    manifest = {str(p.relative_to(scratch)): {"sha256": _sha256(p), "bytes": p.stat().st_size} for p in files}
    (scratch / MANIFEST).write_text(json.dumps({"files": manifest, "torch": torch.__version__}, indent=1))
    for path in [*files, scratch / MANIFEST, *(p for p in scratch.rglob("*") if p.is_dir()), scratch]:
        _flush(path)
    older = final.with_name(f"{final.name}.tmp-older")
    if final.exists():
        final.rename(older)  # the same step, written again after a resume from an earlier one
    scratch.rename(final)
    _flush(final.parent)
    shutil.rmtree(older, ignore_errors=True)
    pointer = final.parent / f"{LATEST}.tmp"
    pointer.write_text(final.name)
    _flush(pointer)
    os.replace(pointer, final.parent / LATEST)
    _flush(final.parent)


def _choose(folder: Path, step: int | None) -> tuple[str | None, str]:
    """The newest step whose files match its manifest, or (None, why not); (None, "") where there is no step
    at all."""
    steps = sorted((n for n in _steps(folder) if step in (None, n)), reverse=True)
    refused = []
    for n in steps:
        path = folder / f"step_{n}"
        fault = _fault(path)
        if fault is None:
            return str(path), ""
        refused.append(f"{path.name}: {fault}")
    if step is not None and not steps:
        refused.append(f"step_{step} does not exist in {folder}")
    return None, "no readable checkpoint: " + "; ".join(refused) if refused else ""


def _fault(path: Path) -> str | None:
    try:
        manifest = json.loads((path / MANIFEST).read_text())["files"]
        for name, entry in manifest.items():
            if (path / name).stat().st_size != entry["bytes"] or _sha256(path / name) != entry["sha256"]:
                return f"{name} does not match the manifest"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"manifest unreadable ({error})"
    return None


def _steps(folder: Path) -> list[int]:
    if not folder.is_dir():
        return []
    return [int(match[1]) for p in folder.iterdir() if (match := STEP.match(p.name))]


def _retire(folder: Path, step: int, keep: int) -> None:
    """Keeps `step` and the newest before it, `keep` in all; what is beyond or half-written was abandoned."""
    older = sorted(n for n in _steps(folder) if n <= step)
    for n in set(_steps(folder)) - set(older[-keep:]):
        shutil.rmtree(folder / f"step_{n}")
    for scratch in folder.glob("step_*.tmp-*"):
        shutil.rmtree(scratch)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
