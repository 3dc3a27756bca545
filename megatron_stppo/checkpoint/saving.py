"""A run's checkpoints, in megatron's distributed format: taken, written beside the training, resumed from.

A save is planned by all ranks and copied to host memory; writing it needs neither the models nor the run's
process groups (writer.py), so it happens in the background, or with run.async_checkpoints=false
before save() returns: the same code, the same bytes. step_folder.py has what is published, and when.

All random numbers of a run are functions of (seed, iteration), so a checkpoint holds no random state and
cannot lose any.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib.metadata
import json
import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.transformer.module import MegatronModule

import megatron_stppo
from megatron_stppo.checkpoint import step_folder as steps
from megatron_stppo.checkpoint.host_copy import HostCopy
from megatron_stppo.checkpoint.step_folder import CheckpointError, Damaged, File, Manifest
from megatron_stppo.checkpoint.writer import Save
from megatron_stppo.config import Config, ConfigError
from megatron_stppo.model.optimizer import Trainer, not_finite
from megatron_stppo.parallel.collectives import (
    all_gather_bytes,
    all_reduce_sum,
    any_rank,
    broadcast_bytes,
    decode,
    encode,
)
from megatron_stppo.parallel.layout import Layout
from megatron_stppo.sharding.hf_names import read_shape
from megatron_stppo.sharding.mlp_spans import LayerSpec

# Every optimizer state in the shape of its parameter and under its name alone: loadable under another layout,
# also where experts that ranks share have an optimizer of their own.
SHARDING = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
FAILURES = 3  # saves in a row that may fail before the run ends
LAST_SECONDS = 60  # that a save in flight gets when the process ends
log = logging.getLogger(__name__)


class Saver:
    """A run's checkpoints while it trains. All methods are collective.

    At most one save is in flight. One that the file system refuses (a full disk) is warned about and removed;
    training goes on and the next checkpoint is tried, because a person may make room while devices work.
    After FAILURES in a row the run ends: it would only have more to lose.
    """

    def __init__(self, folder: Path, config: Config, layout: Layout) -> None:
        self._folder, self._run = folder, config.run
        self._config_sha256 = hashlib.sha256(config.dump().encode()).hexdigest()
        self._layout = {"world": layout.world, **asdict(layout)}
        self._shape = asdict(read_shape(config.model.path))
        # the writers' own, since training goes on in the others; a slow disk may take as long as a phase
        self._group = dist.new_group(timeout=config.timeout, backend="gloo")
        self._thread: threading.Thread | None = None
        self._save: Save | None = None
        self._failures = 0
        self._last = -1  # the step published last, or resumed from
        atexit.register(self._linger)

    def load(self, trainers: dict[str, Trainer]) -> dict[str, Any] | None:
        """load() from the run's folder, after the save in flight."""
        self._settle()
        state = load(self._folder, trainers)
        if state is not None:
            self._last = int(state["iteration"])
        return state

    def newest(self) -> int:
        """The step published or resumed from last, after the save in flight; -1 before there is one."""
        self._settle()
        return self._last

    def save(self, step: int, trainers: dict[str, Trainer], state: dict[str, Any]) -> None:
        """Starts to write step_`step`; `state` is the loop's own, JSON. Waits for the save before it, and
        does nothing if that was the same step. Raises what check() raises, and CheckpointError if a number
        that would be saved is not finite."""
        self._settle()
        if step == self._last:
            return
        if roles := not_finite(trainers):
            raise CheckpointError(
                f"step_{step} is not saved: numbers of {' and '.join(roles)} are not finite; resume from an "
                f"earlier step in {self._folder} with a lower update.{roles[0]}.lr"
            )
        self._save = self._take(step, trainers, state)
        if self._run.async_checkpoints:
            self._thread = threading.Thread(target=self._save.run, name=f"step_{step}", daemon=True)
            self._thread.start()
        else:
            self._save.run()
            self._settle()

    def check(self) -> None:
        """At a step's boundary: takes note of a save that ended. Raises CheckpointError if that was one
        failure too many, and RuntimeError for a fault that is not the file system's."""
        if self._thread is not None and not any_rank(self._thread.is_alive()):
            self._settle()

    def finish(self) -> None:
        """Waits for the save in flight. Raises CheckpointError if it failed, and what check() raises."""
        self._settle()
        if self._failures:
            raise CheckpointError(f"the last checkpoint is not saved; {self._folder} has those before it")

    def _take(self, step: int, trainers: dict[str, Trainer], state: dict[str, Any]) -> Save:
        folder, run = self._folder, self._run
        scratch = folder / f"step_{step}.tmp-{os.environ.get('SLURM_RESTART_COUNT', '0')}"
        copies = {
            role: HostCopy(_tensors(trainer, is_loading=False), scratch / role, keep=run.async_checkpoints)
            for role, trainer in trainers.items()
        }
        own = torch.tensor(sum(copy.bytes for copy in copies.values()))
        chunks = next(iter(trainers.values())).chunks
        made_of = {"shape": self._shape, "layers": layers_of(chunks), "expert": expert_size(chunks)}
        return Save(
            scratch,
            folder / f"step_{step}",
            copies,
            json.dumps(state | {"trainers": _counters(trainers)} | made_of).encode(),
            Manifest(step, {}, self._config_sha256, _versions(), self._layout),
            int(all_reduce_sum(own)),
            partial(steps.retire, folder, step, self._last, run.keep_checkpoints, run.keep_every),
            self._group,
        )

    def _settle(self) -> None:
        """Waits for the save in flight, if any, and draws the consequences, on every rank the same."""
        if self._thread is not None:
            self._thread.join()
        save, self._thread, self._save = self._save, None, None
        if save is None:
            return
        if save.broken is not None:
            raise RuntimeError(f"{save.scratch}: the writer broke") from save.broken
        if not save.refused:
            self._failures, self._last = 0, save.manifest.step
            return
        self._failures += 1
        if self._failures == FAILURES:
            raise CheckpointError(f"{FAILURES} checkpoints in a row could not be saved; {save.refused}")

    def _linger(self) -> None:
        # A thread that is torn off while the interpreter goes down can take the exit code with it.
        if self._thread is not None:
            self._thread.join(LAST_SECONDS)


def load(folder: Path, trainers: dict[str, Trainer], step: int | None = None) -> dict[str, Any] | None:
    """Fills the trainers from `step`, or LATEST's, or else the newest that can be read; returns the loop's
    state, None without any step. Collective. Raises CheckpointError if there are steps but none can be
    trusted."""
    path = _agree(folder, step)
    if path is None:
        return None
    state = steps.read_state(path)
    for role, trainer in trainers.items():
        _check_layers(path, state, trainer.chunks)
        _check_experts(path, state, trainer)
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
    state = steps.read_state(path)
    _check_layers(path, state, model)
    loaded = dist_checkpointing.load({"model": _sharded(model)}, str(path / role))
    _fill(model, loaded["model"])
    return state


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


def _check_experts(path: Path, state: dict[str, Any], trainer: Trainer) -> None:
    # Parameters that are not on all data-parallel ranks have an optimizer of their own, whose states only the
    # distributed optimizer stores under the parameters' names alone.
    written, here = state["expert"], expert_size(trainer.chunks)
    if (written > 1) != (here > 1) and not trainer.settings.distributed:
        raise ConfigError(
            f"{path}: was written with parallel.expert={written}, whose optimizer state does not fit "
            f"parallel.expert={here} with update's distributed=false; set parallel.expert={written}, or go "
            "over a Hugging Face folder with `convert to-hf`"
        )


def step_of(text: str) -> int | None:
    """The step that "step_12" names; None for "latest". Raises ConfigError."""
    if text == "latest":
        return None
    if not steps.STEP.fullmatch(text):
        raise ConfigError(f"checkpoint={text!r}: give step_N, as the folder is called, or latest")
    return steps.number(text)


def _agree(folder: Path, step: int | None) -> Path | None:
    """The step to read, `step` or nothing else if it is given; None where there is none. Rank 0 chooses, all
    ranks read their share of the files. Raises CheckpointError if no step is what was published."""
    candidates = _candidates(folder, step) if dist.get_rank() == 0 else []
    refused = []
    for n in decode(broadcast_bytes(encode(candidates), source=0), list[int]):
        path = folder / f"step_{n}"
        fault = _fault(path)
        if not fault:
            return path
        refused.append(f"{path.name}: {fault}")
        if dist.get_rank() == 0:
            log.warning("%s is refused: %s", path, fault)
    if refused:
        raise CheckpointError(f"{folder}: no readable checkpoint; {'; '.join(refused)}")
    return None


def _candidates(folder: Path, step: int | None) -> list[int]:
    """In the order in which they are tried: LATEST's, then the others, newest first."""
    if step is not None:
        return [step]
    there = steps.found(folder)
    if not there:
        return []
    try:
        named = steps.latest(folder)
    except Damaged as error:
        log.warning("%s %s; the newest step is taken", folder / steps.LATEST, error)
        return there
    return [named, *(n for n in there if n != named)]


def _fault(path: Path) -> str:
    """What is wrong with a step, equal on all ranks; empty if nothing is."""
    found: str | dict[str, File] = ""
    if dist.get_rank() == 0:
        try:
            found = steps.inspect(path)
        except Damaged as error:
            found = str(error)
    found = decode(broadcast_bytes(encode(found), source=0), str | dict[str, File])
    if isinstance(found, str):
        return found
    share = sorted(found.items())[dist.get_rank() :: dist.get_world_size()]
    faults = all_gather_bytes(steps.compare(path, share).encode())
    return next((fault.decode() for fault in faults if fault), "")


def _versions() -> dict[str, str]:
    return {
        "megatron_stppo": megatron_stppo.__version__,
        "torch": torch.__version__,
        "megatron-core": importlib.metadata.version("megatron-core"),
    }


def _tensors(trainer: Trainer, is_loading: bool) -> dict[str, Any]:
    model = _sharded(trainer.chunks)
    optimizer = trainer.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=SHARDING)
    return {"model": model, "optimizer": optimizer}


def _counters(trainers: dict[str, Trainer]) -> dict[str, tuple[int, int, int]]:
    return {role: (trainer.updates, trainer.skipped, trainer.warmup) for role, trainer in trainers.items()}
