"""Finds the newest valid checkpoint of a run and loads it, if it fits the run.

All ranks load the same step: rank 0 lists the steps, and every rank verifies its share of a step's files
against the manifest. step_folder.py describes the files.

A checkpoint records what its models and optimizers are made of, and fits a run that has the same. One of
adapters holds A and B, a critic's head and the optimizer states of these. It has a digest of the frozen
weights, which are read from model.path again, and one of the reference's adapters, which are read from
model.lora.path again. Both are taken when a run builds its models: a save reads neither folder.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from torch.distributed.checkpoint.api import CheckpointException

from megatron_stppo.base.errors import CheckpointError
from megatron_stppo.base.printing import one_line
from megatron_stppo.checkpoint import step_folder as steps
from megatron_stppo.checkpoint.contents import fill, saved_tensors, saved_weights
from megatron_stppo.checkpoint.step_folder import Damaged, File
from megatron_stppo.config import ConfigError
from megatron_stppo.model.optimizer import Trainer
from megatron_stppo.model.token_model import TokenModel
from megatron_stppo.parallel.collectives import broadcast_bytes, by_rank, decode, encode, gather_failures
from megatron_stppo.weights.sharding.hf_checkpoint import weights_digest
from megatron_stppo.weights.sharding.parts import LayerSpec

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


HF = "a Hugging Face folder with `convert to-hf`"


def made_of(trainers: Mapping[str, Trainer]) -> dict[str, Any]:
    """Return what a checkpoint records of its models and optimizers. Collective, see adaptation_of."""
    chunks = next(iter(trainers.values())).chunks
    return {
        "layers": layers_of(chunks),
        "expert": expert_size(chunks),
        "distributed": {role: trainer.settings.distributed for role, trainer in trainers.items()},
        "frozen_attention": frozen_attention(trainers.get("critic")),
        "lora": adaptation_of(chunks),
    }


def check_weights(path: Path, state: Mapping[str, Any], model: Sequence[TokenModel]) -> None:
    """Raise ConfigError unless the weights of the checkpoint `path`, which recorded `state`, fit the model.

    Collective.
    """
    check_layers(path, state, model)
    _check_adapters(path, state["lora"], adaptation_of(model))


def check_resumed(path: Path, state: Mapping[str, Any], role: str, trainer: Trainer) -> None:
    """Raise ConfigError unless a role's trainer can continue from the checkpoint. Collective.

    It then needs the reference that the run began with, which has the initial adapters.
    """
    check_weights(path, state, trainer.chunks)
    check_experts(path, state, trainer)
    check_distributed(path, state, role, trainer)
    if role == "critic":
        before, now = state["frozen_attention"], frozen_attention(trainer)
        _check_same(path, "update.critic.frozen_attention", before, now, "set it as it was")
    here = adaptation_of(trainer.chunks)
    if here is not None and state["lora"]["initial"] != here["initial"]:
        raise ConfigError(
            f"{path}: its run began with other adapters than those of this run's model.lora.path; give those "
            "that it began with (model.lora.path=null if there were none), or another run.name"
        )


def frozen_attention(critic: Trainer | None) -> bool:
    """Return whether a critic's attention has no optimizer states, by update.critic.frozen_attention."""
    return critic is not None and bool(getattr(critic.settings, "frozen_attention", False))


def layers_of(model: Sequence[torch.nn.Module]) -> LayerSpec:
    """Return which layers a model is built from, according to the names of its parameters."""
    names = [name for chunk in model for name, _ in chunk.named_parameters()]
    fused = any(name.endswith("linear_qkv.layer_norm_weight") for name in names)
    return "transformer_engine" if fused else "local"


def expert_size(model: Sequence[TokenModel]) -> int:
    """Return the number of ranks among which a layer's experts are divided."""
    return int(model[0].config.expert_model_parallel_size)


def adaptation_of(model: Sequence[TokenModel]) -> dict[str, Any] | None:
    """Return what a checkpoint records of a model's adapters, or None if all weights are trained.

    Collective. The first call for a folder of frozen weights reads all of them, divided among the ranks; in a
    run, learner.py has made it.
    """
    found = model[0].adaptation
    if found is None:
        return None
    settings = {"rank": found.rank, "alpha": found.alpha, "targets": sorted(found.targets)}
    return settings | {"trunk": weights_digest(found.folder, found.shape), "initial": found.initial}


def check_layers(path: Path, state: Mapping[str, Any], model: Sequence[torch.nn.Module]) -> None:
    """Raise ConfigError if the checkpoint's model has other layers, whose parameters have other names."""
    written, here = state["layers"], layers_of(model)
    where = " on a machine with a GPU and TransformerEngine" if written == "transformer_engine" else ""
    remedy = f"set model.layers={written}{where}. With it, `convert to-hf` writes a Hugging Face folder"
    _check_same(path, "model.layers", written, here, f"{remedy}, from which a run with {here} can start")


def check_experts(path: Path, state: Mapping[str, Any], trainer: Trainer) -> None:
    """Raise ConfigError if distributed=false, and experts are divided among ranks in checkpoint or run only.

    Experts that are divided have an optimizer of their own. Only the states of the distributed optimizer are
    stored under the parameters' names alone.
    """
    written, here = state["expert"], expert_size(trainer.chunks)
    if (written > 1) != (here > 1) and not trainer.settings.distributed:
        raise ConfigError(
            f"{path}: was written with parallel.expert={written}, whose optimizer state does not fit "
            f"parallel.expert={here} with update's distributed=false; set parallel.expert={written}, or "
            f"convert it to {HF}"
        )


def check_distributed(path: Path, state: Mapping[str, Any], role: str, trainer: Trainer) -> None:
    """Raise ConfigError if the optimizer's states are stored in the other of megatron's two ways."""
    here, remedy = trainer.settings.distributed, f"set it as it was, or convert the checkpoint to {HF}"
    _check_same(path, f"update.{role}.distributed", state["distributed"].get(role, here), here, remedy)


def _check_adapters(path: Path, written: dict[str, Any] | None, here: dict[str, Any] | None) -> None:
    remedy, none = "set model.lora as its run had it, or give another run.name", {"rank": 0}
    for name in ("rank", "alpha", "targets"):
        before, now = ((adapters or none).get(name) for adapters in (written, here))
        _check_same(path, f"model.lora.{name}", before, now, remedy)
    if written is not None and here is not None and written["trunk"] != here["trunk"]:
        raise ConfigError(
            f"{path}: its adapters belong to other weights than those of model.path; give the model that its "
            "run began with, or another run.name"
        )


def _check_same(path: Path, field: str, written: Any, here: Any, remedy: str) -> None:
    if written != here:
        before, now = (str(x).lower() if isinstance(x, bool) else x for x in (written, here))
        raise ConfigError(f"{path}: was written with {field}={before}, this run has {now}; {remedy}")
