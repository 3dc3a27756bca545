"""Which checkpoints fit a run: the layers of their model, and how their optimizer states are stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_stppo.config import ConfigError
from megatron_stppo.model.optimizer import Trainer
from megatron_stppo.model.token_model import TokenModel
from megatron_stppo.sharding.mlp_spans import LayerSpec


def made_of(trainers: Mapping[str, Trainer]) -> dict[str, Any]:
    """Return what a checkpoint records of its models and optimizers, for the checks of this file."""
    chunks = next(iter(trainers.values())).chunks
    return {
        "layers": layers_of(chunks),
        "expert": expert_size(chunks),
        "distributed": {role: trainer.settings.distributed for role, trainer in trainers.items()},
    }


def check_fit(path: Path, state: Mapping[str, Any], role: str, trainer: Trainer) -> None:
    """Raise ConfigError unless a role's trainer can load the checkpoint `path`, which recorded `state`."""
    check_layers(path, state, trainer.chunks)
    check_experts(path, state, trainer)
    check_distributed(path, state, role, trainer)


def layers_of(model: Sequence[torch.nn.Module]) -> LayerSpec:
    """Return which layers a model is built from, according to the names of its parameters."""
    names = [name for chunk in model for name, _ in chunk.named_parameters()]
    fused = any(name.endswith("linear_qkv.layer_norm_weight") for name in names)
    return "transformer_engine" if fused else "local"


def check_layers(path: Path, state: Mapping[str, Any], model: Sequence[torch.nn.Module]) -> None:
    """Raise ConfigError if the checkpoint's model has other layers, whose parameters have other names."""
    written, here = state["layers"], layers_of(model)
    if written != here:
        where = " on a machine with a GPU and TransformerEngine" if written == "transformer_engine" else ""
        raise ConfigError(
            f"{path}: was written with model.layers={written}, this run has {here}; set "
            f"model.layers={written}{where}. With it, `convert to-hf` writes a Hugging Face folder, from "
            f"which a run with {here} can start"
        )


def expert_size(model: Sequence[TokenModel]) -> int:
    """Return the number of ranks among which a layer's experts are divided."""
    return int(model[0].config.expert_model_parallel_size)


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
            "convert it to a Hugging Face folder with `convert to-hf`"
        )


def check_distributed(path: Path, state: Mapping[str, Any], role: str, trainer: Trainer) -> None:
    """Raise ConfigError if the optimizer's states are stored in the other of megatron's two ways."""
    here = trainer.settings.distributed
    written = state["distributed"].get(role, here)
    if written != here:
        raise ConfigError(
            f"{path}: was written with update.{role}.distributed={str(written).lower()}, this run has "
            f"{str(here).lower()}; set it as it was, or convert the checkpoint to a Hugging Face folder with "
            "`convert to-hf`"
        )
