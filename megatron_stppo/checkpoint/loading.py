"""Finds the newest valid checkpoint of a run and loads it.

All ranks load the same step: rank 0 lists the steps, and every rank verifies its share of a step's files
against the manifest. step_folder.py describes the files.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from torch.distributed.checkpoint.api import CheckpointException

from megatron_stppo.base.errors import CheckpointError
from megatron_stppo.base.printing import one_line
from megatron_stppo.checkpoint import step_folder as steps
from megatron_stppo.checkpoint.contents import fill, saved_tensors, saved_weights
from megatron_stppo.checkpoint.fit import check_resumed, check_weights
from megatron_stppo.checkpoint.step_folder import Damaged, File
from megatron_stppo.config import ConfigError
from megatron_stppo.model.optimizer import Trainer
from megatron_stppo.model.token_model import TokenModel
from megatron_stppo.parallel.collectives import broadcast_bytes, by_rank, decode, encode, gather_failures

log = logging.getLogger(__name__)


def load(folder: Path, trainers: dict[str, Trainer], step: int | None = None) -> dict[str, Any] | None:
    """Load a checkpoint into the trainers and return the state of the training loop. Collective.

    step: the step to load. None loads the step that LATEST names or, if it is damaged, the newest valid one.
    Return None if no step exists. Raises CheckpointError if there are steps but none is valid.
    """
    path = _agree(folder, step)
    if path is None:
        return None
    state = steps.read_state(path)
    for role, trainer in trainers.items():
        check_resumed(path, state, role, trainer)
        if role not in state["trainers"]:
            raise ConfigError(f"{path}: has no {role}, because its run had none; start a new run")
        loaded = _read(saved_tensors(trainer, is_loading=True), path / role)
        fill(trainer.chunks, loaded["model"])
        whole = None if trainer.settings.distributed else loaded["optimizer"]
        trainer.restore(whole, *state["trainers"][role])
    return state


def load_weights(
    folder: Path, role: str, model: Sequence[TokenModel], step: int | None = None
) -> dict[str, Any]:
    """Load the weights of a checkpoint into a model's chunks and return the state of the training loop.

    step: as for load(). Collective. Raises CheckpointError if there is no valid checkpoint.
    """
    path = _agree(folder, step)
    if path is None:
        raise CheckpointError(f"{folder}: holds no checkpoint; train first, or omit the checkpoint")
    state = steps.read_state(path)
    check_weights(path, state, model)
    loaded = _read({"model": saved_weights(model)}, path / role)
    fill(model, loaded["model"])
    return state


def step_of(text: str) -> int | None:
    """Return the step number of a name such as "step_12", or None for "latest". Raises ConfigError."""
    if text == "latest":
        return None
    if not steps.STEP.fullmatch(text):
        raise ConfigError(f"checkpoint={text!r}: give the name of a folder, step_N, or latest")
    return steps.number(text)


def _read(tensors: dict[str, Any], folder: Path) -> dict[str, Any]:
    # Without megatron's check that every element is loaded by one main replica: every rank would collect the
    # description of all shards. What a rank asks for is checked against the files.
    try:
        return dist_checkpointing.load(tensors, str(folder), validate_access_integrity=False)
    except CheckpointException as error:
        # torch raises it on all ranks. It is a BaseException, but not an Exception: without this the process
        # would end without one of our exit codes, and without a reason in exit.json.
        causes = {rank: f"{type(cause).__name__}: {cause}" for rank, (cause, _) in error.failures.items()}
        raise CheckpointError(f"{folder}: cannot be loaded ({one_line(by_rank(causes))})") from error


def _agree(folder: Path, step: int | None) -> Path | None:
    """Return the folder of the step to load, equal on all ranks, or None if no step exists. Collective.

    If `step` is given, no other step is considered. Rank 0 lists the candidates, and every rank verifies its
    share of the files. Raises CheckpointError if no candidate matches its manifest.
    """
    candidates = []
    if dist.get_rank() == 0:
        candidates = steps.candidates(folder) if step is None else [step]
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


def _fault(path: Path) -> str:
    """Return the first fault found in a step, or "" if it is valid. Collective; equal on all ranks."""
    contents: str | dict[str, File] = ""
    if dist.get_rank() == 0:
        try:
            contents = steps.inspect(path)
        except Damaged as error:
            contents = str(error)
    contents = decode(broadcast_bytes(encode(contents), source=0), str | dict[str, File])
    if isinstance(contents, str):
        return contents
    share = sorted(contents.items())[dist.get_rank() :: dist.get_world_size()]
    return next(iter(gather_failures(steps.compare(path, share) or None, str).values()), "")
