"""Writes an adapter of random numbers in the format of the package `peft`, as its save_pretrained does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megatron_stppo.config.model import LINEAR
from megatron_stppo.weights.sharding.hf_names import read_shape
from megatron_stppo.weights.sharding.low_rank import adapter_shapes

# What peft 0.21.2 writes for LoraConfig(r=4, lora_alpha=6, target_modules="all-linear").
WRITTEN: dict[str, Any] = {
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "arrow_config": None,
    "auto_mapping": None,
    "base_model_name_or_path": "model",
    "bias": "none",
    "corda_config": None,
    "ensure_weight_tying": False,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "kasa_config": None,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_alpha": 6,
    "lora_bias": False,
    "lora_dropout": 0.0,
    "lora_ga_config": None,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "monteclora_config": None,
    "peft_type": "LORA",
    "peft_version": "0.21.2",
    "qalora_group_size": 16,
    "r": 4,
    "rank_pattern": {},
    "revision": None,
    "target_modules": sorted(LINEAR),
    "target_parameters": None,
    "task_type": "CAUSAL_LM",
    "trainable_token_indices": None,
    "use_bdlora": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
    "velora_config": None,
}


def write_adapter(folder: Path, model: Path, **changes: Any) -> dict[str, torch.Tensor]:
    """Write an adapter of every layer of a model's folder. Return its tensors by checkpoint name.

    changes: to adapter_config.json.
    """
    generator, settings = torch.Generator().manual_seed(5), WRITTEN | changes
    shapes = adapter_shapes(read_shape(model), settings["r"], settings["target_modules"])
    tensors = {
        key: 0.3 * (2 * torch.rand(*size, generator=generator) - 1) / size[1] ** 0.5
        for key, size in shapes.items()
    }
    save(folder, tensors, settings)
    return tensors


def save(folder: Path, tensors: dict[str, torch.Tensor], settings: dict[str, Any]) -> None:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    named = {f"base_model.model.{key}": tensor for key, tensor in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors", {"format": "pt"})
