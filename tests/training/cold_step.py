"""Functions that run on a rank: the losses of cold-start steps, of all weights and of adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_stppo.cluster.launch import process


def losses(
    model: str, scripts: list[tuple[tuple[int, ...], tuple[bool, ...]]], weights: list[float]
) -> list[tuple[float, float]]:
    """Return the losses before the first optimizer step, of all tokens and of turns, for each weight."""
    process.prepare(engine=False)
    import torch

    from megatron_stppo.config import Config
    from megatron_stppo.data.demonstrations import Demonstration
    from megatron_stppo.model import build
    from megatron_stppo.model.pipeline import packer_of
    from megatron_stppo.model.policy_head import PolicyHead
    from megatron_stppo.parallel import groups
    from megatron_stppo.training.cold_start import train_step
    from megatron_stppo.weights.sharding.hf_names import read_shape

    # 8 tokens per microbatch: each rank has several
    config = Config.model_validate({"model": {"path": model}, "update": {"tokens_per_microbatch": 8}})
    mesh, shape = groups.initialize(config.parallel), read_shape(Path(model))
    found = []
    for weight in weights:
        trainer = build.trainer("actor", shape, config, mesh, torch.float32)
        head, packer = PolicyHead.of(trainer.model, mesh, shape.vocab), packer_of(config, shape, mesh)
        given = [Demonstration(*script) for script in scripts]
        found.append(train_step(trainer, head, given, weight, mesh, packer, 1.0))
    return found


def adapted(
    model: str, other: str, scripts: list[tuple[tuple[int, ...], tuple[bool, ...]]], out: str
) -> tuple[list[float], float]:
    """Train adapters for 4 steps on the same scripts, and write them to `out` after 3.

    other: a model of the same shape. Return the losses of the steps, and that of the imported adapters. The
    frozen weights must not change.
    """
    process.prepare(engine=False)
    import pytest
    import torch

    from megatron_stppo.config import Config, ConfigError
    from megatron_stppo.data.demonstrations import Demonstration
    from megatron_stppo.model import build
    from megatron_stppo.model.pipeline import packer_of
    from megatron_stppo.model.policy_head import PolicyHead
    from megatron_stppo.parallel import groups
    from megatron_stppo.training.cold_start import export, train_step
    from megatron_stppo.weights.sharding.hf_checkpoint import check_base
    from megatron_stppo.weights.sharding.hf_names import read_shape

    def start(path: str | None) -> Any:
        lora = {"rank": 2, "targets": ["q_proj", "v_proj", "down_proj"], "path": path}
        sections = {"model": {"path": model, "lora": lora}, "update": {"actor": {"lr": 0.01}}}
        return Config.model_validate(sections | {"parallel": {"tensor": 2}})

    mesh, shape = groups.initialize(start(None).parallel), read_shape(Path(model))
    given = [Demonstration(*script) for script in scripts]

    def step(trainer: Any, config: Any) -> float:
        head, packer = PolicyHead.of(trainer.model, mesh, shape.vocab), packer_of(config, shape, mesh)
        return train_step(trainer, head, given, 1.0, mesh, packer, 1.0)[0]

    trainer = build.trainer("actor", shape, start(None), mesh, torch.float32)
    frozen = [p for p in build.named_parameters(trainer.chunks).values() if not p.requires_grad]
    before = [p.clone() for p in frozen]
    found = [step(trainer, start(None)) for _ in range(3)]
    said = export(Path(out), trainer, start(None), shape, mesh)
    assert said.startswith("the adapters (12 tensors, 0.0 M parameters) are "), said
    found.append(step(trainer, start(None)))
    assert all(map(torch.equal, frozen, before)), "only adapters are trained"
    with pytest.raises(
        ConfigError, match=r"trained on other weights than those in model\.path=.*other; give"
    ):
        check_base(Path(out), Path(other), shape)
    imported = build.trainer("actor", shape, start(out), mesh, torch.float32)
    return found, step(imported, start(out))
