"""A function that runs on a rank: the loss of one cold-start step for several weights of the context."""

from __future__ import annotations

from pathlib import Path

from megatron_stppo.launch import process


def losses(
    model: str, scripts: list[tuple[tuple[int, ...], tuple[bool, ...]]], weights: list[float]
) -> list[float]:
    """Return the loss before the first optimizer step, in nats per unit of weight, for each weight."""
    process.prepare(engine=False)
    import torch

    from megatron_stppo.commands.cold_start import as_batch, train_step
    from megatron_stppo.config import Config
    from megatron_stppo.data.demonstrations import Demonstration
    from megatron_stppo.model import build
    from megatron_stppo.model.pipeline import Packer
    from megatron_stppo.model.policy_head import PolicyHead
    from megatron_stppo.parallel import groups
    from megatron_stppo.sharding.hf_names import read_shape

    # 8 tokens per microbatch: each rank has several
    config = Config.model_validate({"model": {"path": model}, "update": {"tokens_per_microbatch": 8}})
    mesh, shape = groups.initialize(config.parallel), read_shape(Path(model))
    found = []
    for weight in weights:
        trainer = build.trainer("actor", shape, config, mesh, torch.float32)
        head, packer = PolicyHead.of(trainer.model, mesh, shape.vocab), Packer.of(config, shape, mesh)
        batch = as_batch([Demonstration(*script) for script in scripts], weight)
        found.append(train_step(trainer, head, batch, mesh, packer, 1.0))
    return found
