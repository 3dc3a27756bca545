"""The command `convert to-peft`: write a checkpoint's adapters in the format of the package `peft`.

The folder has two files. adapter_model.safetensors holds every A and B, and adapter_config.json their rank,
alpha and targets, and the folder of the weights that they belong to. The metadata of the first have hashes of
these weights and of their tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_stppo.base.files import make_scratch
from megatron_stppo.checkpoint import loading as checkpoints
from megatron_stppo.checkpoint.convert import gather, on_first
from megatron_stppo.cluster.launch import process
from megatron_stppo.config import Config
from megatron_stppo.config.model import LoraConfig
from megatron_stppo.config.peft_folder import DIGEST, PREFIX, SETTINGS, TENSORS
from megatron_stppo.data.text.tokenizer_files import digests
from megatron_stppo.model import build
from megatron_stppo.parallel.groups import MeshRank
from megatron_stppo.weights.sharding.hf_checkpoint import weights_digest
from megatron_stppo.weights.sharding.hf_names import ModelShape, read_shape
from megatron_stppo.weights.sharding.hf_write import publish, write_tensors
from megatron_stppo.weights.sharding.low_rank import adapter_shapes


def to_peft(config: Config, checkpoint: str, output: Path) -> None:
    """Write the adapters of the actor of a checkpoint ("step_N" or "latest") to the new folder `output`.

    Prints one line that says what was written. Collective. Raises ConfigError and CheckpointError.
    """
    config = config.of_checkpoint()
    mesh, shape = process.start(config), read_shape(config.model.path)
    model = build.from_hf("actor", shape, config, mesh, process.dtype(config))
    folder = config.run.folder / "checkpoints"
    state = checkpoints.load_weights(folder, "actor", model, checkpoints.step_of(checkpoint))
    size = export_peft(output, build.named_parameters(model), shape, config, mesh)
    if mesh.rank == 0:
        step = folder / f"step_{state['iteration']}"
        print(f"wrote {output}: {size}; adapters of {step}")
    process.stop()


def export_peft(
    folder: Path,
    parameters: Mapping[str, Tensor],
    shape: ModelShape,
    config: Config,
    mesh: MeshRank,
) -> str:
    """Write the adapters of all ranks to `folder`, and return their size as text. Collective.

    parameters: named_parameters of this rank. The folder is renamed into place when it is complete. Raises
    ConfigError on all ranks if it exists or cannot be written.
    Example of the size: "8 tensors, 0.1 M parameters".
    """
    lora = config.model.lora
    layouts = {rank: build.adapters_of_rank(shape, config, mesh.layout, rank) for rank in range(mesh.world)}
    shapes = adapter_shapes(shape, lora.rank, lora.names)
    whole = gather(parameters, layouts, shape, shapes, shapes)
    settings = adapter_config(lora, config.model.path, whole)
    recorded = {DIGEST: weights_digest(config.model.path, shape)} | digests(config.model.path)
    on_first(None, lambda: _write(Path(folder), settings, whole, recorded))
    return f"{len(shapes)} tensors, {sum(a * b for a, b in shapes.values()) / 1e6:,.1f} M parameters"


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


def _write(
    folder: Path, settings: dict[str, Any], tensors: dict[str, Tensor], recorded: dict[str, str]
) -> None:
    partial = make_scratch("output", folder)
    (partial / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    named = {PREFIX + key: tensor for key, tensor in tensors.items()}
    write_tensors(named, partial / TENSORS, partial / SETTINGS, recorded)
    publish(partial, folder)
