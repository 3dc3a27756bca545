"""Functions that run on a rank: the first step of the same weights and batch under several settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_stppo.cluster.launch import process
from tests.training.update.layouts import SETTINGS, batch


def first_steps(
    model: str, algorithms: dict[str, dict[str, Any]], grad_clips: dict[str, float]
) -> dict[str, tuple[Any, Any, Any]]:
    """Return {name: (numbers, gradient passed to Adam, change of the weights)}, as flat float64 lists."""
    process.prepare(engine=False)
    import torch

    from megatron_stppo.config import Config
    from megatron_stppo.model import build
    from megatron_stppo.model.pipeline import logprobs, packer_of
    from megatron_stppo.model.policy_head import PolicyHead
    from megatron_stppo.parallel import groups
    from megatron_stppo.training.update.actor_step import ActorLoss, actor_step, minibatch_weights
    from megatron_stppo.weights.sharding.hf_names import read_shape

    def config_of(algorithm: dict[str, Any], grad_clip: float) -> Config:
        settings = {"distributed": False, "weight_decay": 0.0, "grad_clip": grad_clip}
        update = {"actor": SETTINGS | settings}
        return Config.model_validate({"model": {"path": model}, "update": update, "algorithm": algorithm})

    mesh, shape = groups.initialize(config_of({}, 1.0).parallel), read_shape(Path(model))
    found = {}
    for name, algorithm in algorithms.items():
        config = config_of(
            {"entropy_coefficient": 0, "kl_coefficient": 0} | algorithm,
            grad_clips.get(name, SETTINGS["grad_clip"]),
        )
        actor, a = build.trainer("actor", shape, config, mesh, torch.float32), config.algorithm
        head, packer = (
            PolicyHead.of(actor.model, mesh, shape.vocab, segments=a.segments),
            packer_of(config, shape, mesh),
        )
        given = batch(same=0)
        every = packer.whole(given)
        own_T = logprobs(actor.model, head, given, packer, [every])
        given = replace(given, old_logprob_T=own_T + given.old_logprob_T)
        parameters = [p for chunk in actor.chunks for p in chunk.parameters()]
        before = [p.detach().clone() for p in parameters]
        loss = ActorLoss(given, minibatch_weights(given, every.chosen, a), a, head)
        step = actor_step(actor, loss, every, packer)
        numbers, ratios = step.metrics, step.ratios
        share = float(ratios.clipped_T[ratios.live_T].double().mean())
        assert abs(share - numbers["actor/clip_fraction"]) < 1e-6, name  # the records of turns say the same
        gradient = torch.cat([p.main_grad.reshape(-1) for p in parameters])
        moved = torch.cat([(p.detach() - old).reshape(-1) for p, old in zip(parameters, before, strict=True)])
        found[name] = (numbers, gradient.tolist(), moved.tolist())
    return found
