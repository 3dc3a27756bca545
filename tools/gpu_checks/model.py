"""Random models, configurations and trajectories for the checks. Everything is made here; no file is read."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from megatron_stppo.base.types import Task, Trajectory, Turn
from megatron_stppo.cluster.launch import process
from megatron_stppo.config import Config
from megatron_stppo.config.file import validate
from megatron_stppo.weights.sharding.hf_names import read_shape

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128}
SMALL = {"hidden": 256, "ffn": 512, "layers": 2, "heads": 8, "kv_heads": 2, "head_dim": 32, "vocab": 1024}


def write_model(folder: Path, experts: dict[str, int] | None = None, **sizes: int) -> Path:
    """Write a Qwen3 of random weights to `folder` and return it.

    experts: the fields of Qwen3MoeConfig that describe the experts; None: no experts.
    sizes: those of SMALL that differ.
    """
    size = SMALL | sizes
    torch.manual_seed(0)
    kind, model = (Qwen3MoeConfig, Qwen3MoeForCausalLM) if experts else (Qwen3Config, Qwen3ForCausalLM)
    config = kind(
        hidden_size=size["hidden"],
        intermediate_size=size["ffn"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"],
        num_key_value_heads=size["kv_heads"],
        head_dim=size["head_dim"],
        vocab_size=size["vocab"],
        max_position_embeddings=32_768,
        tie_word_embeddings=False,
        dtype="bfloat16",
        **experts or {},
    )
    with torch.device(DEVICE):
        model(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def work() -> Path:
    """Return the folder that the checks of one run share."""
    return Path(os.environ["GPU_CHECKS_WORK"])


def once(name: str, experts: dict[str, int] | None = None, **sizes: int) -> Path:
    """Return the model of this name in the shared folder, written by the first check that needs it."""
    folder = work() / name
    return folder if folder.exists() else write_model(folder, experts, **sizes)


def configuration(folder: Path, /, **sections: dict[str, Any]) -> Config:
    """Return the configuration of a run of st_ppo with local layers and without an engine."""
    given: dict[str, dict[str, Any]] = {
        "model": {"path": str(folder), "layers": "local"},
        "run": {"root": str(folder.parent)},
        "update": {"minibatches": 1, "tokens_per_microbatch": 1024},
        "algorithm": {"preset": "st_ppo"},
    }
    for name, section in sections.items():
        given[name] = given.get(name, {}) | section
    return validate(given)


def learner_of(config: Config) -> Any:
    """Return the models of a run on one rank."""
    from megatron_stppo.model.learner import build_learner  # not before process.prepare

    mesh, shape = process.start(config), read_shape(config.model.path)
    return build_learner(config, shape, mesh, process.dtype(config))


def trajectories(vocab: int, lengths: Sequence[int], turns: int = 3, seed: int = 0) -> list[Trajectory]:
    """Return a trajectory of random tokens per length, about half of them action tokens. Rewards: 0 or 1."""
    draw = random.Random(seed)
    played = []
    for number, length in enumerate(lengths):
        ids = [draw.randrange(vocab) for _ in range(length)]
        prompt = length // 4
        share = (length - prompt) // turns
        cut, reward, made = max(1, 2 * share // 3), float(draw.random() < 0.5), list[Turn]()
        for k in range(turns):
            part, last = ids[prompt + share * k : prompt + share * (k + 1)], k == turns - 1
            observed, won = ((), reward) if last else (tuple(part[cut:]), 0.0)
            made.append(Turn(tuple(part[:cut]), (-1.0,) * cut, observed, won, ((0, cut),)))
        task = Task("random", (), ("",), "train", number // 4)
        played.append(Trajectory(task, tuple(ids[:prompt]), tuple(made), "ok", group=number // 4))
    return played
