"""The command `convert to-peft`: write a checkpoint's adapters in the format of the package `peft`.

The folder has two files. adapter_model.safetensors holds every A and B, and adapter_config.json their rank,
alpha and targets, and the folder of the weights that they belong to.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_stppo.checkpoint import saving as checkpoints
from megatron_stppo.commands.convert import gather, on_first, publish, write_tensors
from megatron_stppo.config import Config
from megatron_stppo.config.model import LoraConfig
from megatron_stppo.launch import process
from megatron_stppo.model import build
from megatron_stppo.sharding.hf_names import read_shape
from megatron_stppo.sharding.low_rank import adapter_shapes
from megatron_stppo.validation.checks import check_absent

SETTINGS, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of the name of every tensor


def to_peft(config: Config, checkpoint: str, output: Path) -> None:
    """Write the adapters of the actor of a checkpoint ("step_N" or "latest") to the new folder `output`.

    Prints one line that says what was written. Collective. Raises ConfigError and CheckpointError.
    """
    mesh, shape, lora = process.start(config), read_shape(config.model.path), config.model.lora
    model = build.from_hf("actor", shape, config, mesh, process.dtype(config))
    folder = config.run.folder / "checkpoints"
    state = checkpoints.load_weights(folder, "actor", model, checkpoints.step_of(checkpoint))
    layouts = {rank: build.adapters_of_rank(shape, config, mesh.layout, rank) for rank in range(mesh.world)}
    shapes = adapter_shapes(shape, lora.rank, lora.names)
    whole = gather(build.named_parameters(model), layouts, shapes, shapes)
    settings = adapter_config(lora, config.model.path, whole)
    on_first(None, lambda: _write(Path(output), settings, whole))
    if mesh.rank == 0:
        step, numbers = folder / f"step_{state['iteration']}", sum(x.numel() for x in whole.values())
        print(f"wrote {output}: {len(whole)} tensors, {numbers / 1e6:,.1f} M parameters; adapters of {step}")
    process.stop()


def adapter_config(lora: LoraConfig, base: Path, keys: Collection[str]) -> dict[str, Any]:
    """Return the contents of adapter_config.json. keys: the checkpoint names of every A and B.

    Example: of rank 16, alpha 32 and q_proj, it has r 16, lora_alpha 32 and target_modules ["q_proj"].
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "target_modules": sorted({key.split(".")[-3] for key in keys}),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "modules_to_save": None,
        "inference_mode": True,
    }


def _write(folder: Path, settings: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    check_absent("output", folder)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by an interrupted export
    partial.mkdir(parents=True)
    (partial / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    named = {PREFIX + key: tensor for key, tensor in tensors.items()}
    write_tensors(named, partial / TENSORS, partial / SETTINGS)
    publish(partial, folder)
