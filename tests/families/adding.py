"""Functions of a rank that trains a model of a family which only this rank's process knows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import megatron_stppo.families
from tests.ranks import leave_group
from tests.rollout.vllm.tiny import CONTEXT, VOCABULARY, build_tokenizer
from tests.training.loop.small_run import ROOT

FIELDS: dict[str, Any] = {
    "model_type": "twin",
    "architectures": ["TwinForCausalLM"],
    "dtype": "float32",
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-6,
}


def write(folder: Path) -> None:
    """Write a random model of two layers."""
    from megatron_stppo.weights.sharding.hf_names import hf_shapes, read_shape

    folder.mkdir()
    build_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(FIELDS))
    shape, generator = read_shape(folder), torch.Generator().manual_seed(0)
    tensors = {
        shape.stored(name): (len(size) == 1) + 0.1 * torch.randn(size, generator=generator)
        for name, size in hf_shapes(shape).items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def train(folder: Path, config: Path, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Write a model, train it for an iteration, and return the iteration's metrics."""
    settings = _settings(folder, config, overrides, "train")
    from megatron_stppo.commands.train import start_training

    start_training(settings)
    (row,) = (settings.run.folder / "metrics.jsonl").read_text().splitlines()
    return json.loads(row)


def export(folder: Path, config: Path, overrides: tuple[str, ...]) -> dict[str, bool]:
    """Export the trained model, and return whether each of its tensors differs from those of the folder."""
    settings = _settings(folder, config, overrides, "convert")
    from megatron_stppo.checkpoint.convert import to_hf

    to_hf(settings, "latest", folder.with_name("out"))
    before, after = (load_file(at / "model.safetensors") for at in (folder, folder.with_name("out")))
    return {name: not torch.equal(before[name], after[name]) for name in before | after}


def _settings(folder: Path, config: Path, overrides: tuple[str, ...], command: str) -> Any:
    leave_group()
    megatron_stppo.families.__path__.append(str(Path(__file__).parent / "made_up"))
    from megatron_stppo.commands.open_run import open_config

    if not folder.exists():
        write(folder)
    return open_config(config, [f"model.path={folder}", *overrides], command, modules=ROOT)
