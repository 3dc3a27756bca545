"""Function that runs on a rank: how far the real optimizer moves a weight over steps of given gradients."""

from __future__ import annotations

from pathlib import Path

from megatron_stppo.cluster.launch import process
from tests.training.update.layouts import SETTINGS


def moves(
    model: str, distributed: bool, cases: dict[str, list[tuple[float, float]]]
) -> dict[str, list[float]]:
    """Return {name: the distance that each step moves a weight, in units of the learning rate}.

    An entry of a case is (gradient of every weight, scale of the step's rate). The rate warms up over 8
    steps: the n-th step has n / 8 of it.
    """
    process.prepare(engine=False)
    import torch

    from megatron_stppo.config import Config
    from megatron_stppo.model import build
    from megatron_stppo.parallel import groups
    from megatron_stppo.weights.sharding.hf_names import read_shape

    settings = SETTINGS | {"weight_decay": 0.0, "distributed": distributed, "warmup_fraction": 1.0}
    update = {"minibatches": 1, "actor": settings}
    config = Config.model_validate({"model": {"path": model}, "run": {"iterations": 8}, "update": update})
    mesh, shape = groups.initialize(config.parallel), read_shape(Path(model))
    found = {}
    for name, entries in cases.items():
        actor = build.trainer("actor", shape, config, mesh, torch.float32)
        moved = []
        weights = [p for chunk in actor.chunks for p in chunk.parameters()]
        for gradient, scale in entries:
            actor.zero()
            for weight in weights:
                weight.main_grad.fill_(gradient)
            before = [p.detach().double() for p in weights]
            actor.step(actor.reduce(), rate_scale=scale)
            far = [float((b - p.detach()).mean()) for b, p in zip(before, weights, strict=True)]
            assert max(far) - min(far) < 1e-3 * SETTINGS["lr"], "all weights move alike"
            moved.append(far[0] / SETTINGS["lr"])
        assert actor.updates == len(moved)
        found[name] = moved
    return found
