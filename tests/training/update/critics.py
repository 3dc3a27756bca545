"""Function that runs on a rank: an update with several steps of the critic and none of the actor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_stppo.cluster.launch import process
from tests.training.update.layouts import SETTINGS, batch


def several(model: str, folder: str, steps: int) -> tuple[dict[str, Any], int, dict[str, bool]]:
    """Return the row of an update whose actor is held, the critic's number of steps, and whether each model's
    weights changed."""
    process.prepare(engine=False)
    import torch

    from megatron_stppo.config import Config
    from megatron_stppo.model.learner import build_learner
    from megatron_stppo.parallel import groups
    from megatron_stppo.training.stages import score, update
    from megatron_stppo.weights.sharding.hf_names import read_shape

    config = Config.model_validate(
        {
            "run": {"root": folder},
            "model": {"path": model},
            "update": {"minibatches": 2, "critic_steps": steps, "critic": SETTINGS},
            "algorithm": {"preset": "st_ppo", "kl_coefficient": 0},
        }
    )
    mesh, shape = groups.initialize(config.parallel), read_shape(Path(model))
    learner = build_learner(config, shape, mesh, torch.float32)

    def weights() -> dict[str, list[Any]]:
        models = {"actor": learner.actor, "critic": learner.critic}
        return {
            role: [p.detach().clone() for chunk in one.chunks for p in chunk.parameters()]
            for role, one in models.items()
            if one is not None
        }

    before = weights()
    row, _, _ = update(learner, score(learner, batch(), 0), 0, hold=True)
    changed = {
        role: any(not torch.equal(a, b) for a, b in zip(before[role], after, strict=True))
        for role, after in weights().items()
    }
    assert learner.critic is not None
    return row, learner.critic.updates, changed
