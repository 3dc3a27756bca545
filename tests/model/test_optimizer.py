"""The trained model with its optimizer: the norm of its gradients, and its settings after a resume."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_stppo.cluster.launch import process
from megatron_stppo.model.optimizer import _norm_of
from tests.plan import real_step
from tests.ranks import run_ranks


@pytest.mark.parametrize("parallel", [{"tensor": 2, "sequence": True}, {"expert": 2}])
def test_the_gradient_norm_is_megatrons(parallel: dict[str, Any], tmp_path: Path) -> None:
    real_step.write_model(tmp_path, "Qwen3Moe" if "expert" in parallel else "Qwen2")
    first, second = run_ranks(norms, 2, str(tmp_path), parallel)
    assert first == second and len(first) == 5
    for ours, of_megatron in first:
        assert ours == pytest.approx(of_megatron, rel=1e-5) and ours > 0


def test_the_norm_of_many_numbers_on_a_host_is_not_too_low() -> None:
    """28 million numbers, as in the embedding of a 135M model: float32 adds them up 0.17 % too low."""
    many = torch.full((28_000_000,), 1e-3)
    assert float(_norm_of([many[:9], many[9:]])) == pytest.approx(1e-3 * math.sqrt(28e6), rel=1e-6)


def norms(folder: str, parallel: dict[str, Any]) -> list[tuple[float, float]]:
    """Return (Trainer's norm, megatron's) of random gradients of 5 sizes. Runs on a rank."""
    process.prepare(engine=False)
    from megatron_stppo.model import build
    from megatron_stppo.parallel import groups
    from megatron_stppo.weights.sharding.hf_names import read_shape

    config = real_step.settings(folder, {}, parallel)
    mesh, found = groups.initialize(config.parallel), []
    trainer = build.trainer("actor", read_shape(config.model.path), config, mesh, torch.float32)
    torch.manual_seed(mesh.rank)
    for exponent in range(-3, 2):
        for buffer in trainer.gradient_buffers():
            buffer.normal_().mul_(10.0**exponent)
        found.append((trainer.reduce(), float(trainer.optimizer.get_grad_norm())))
    return found


def test_an_optimizer_has_the_settings_of_the_configuration_and_not_of_a_checkpoint(tmp_path: Path) -> None:
    """A norm has no weight decay, whatever the configuration says. The warm-up is a share of the iterations
    with which the run began."""
    real_step.write_model(tmp_path, "Qwen2")
    (found,) = run_ranks(resumed_optimizers, 1, str(tmp_path))
    groups, warm_ups = found
    assert groups == {((0.5, 0.75), 0.25, True, 7.0), ((0.5, 0.75), 0.0, True, 7.0)}
    assert warm_ups == {
        "same": 20,  # 0.5 of 10 iterations of 4 steps
        "more iterations": 20,
        "warmup_fraction=0": 0,
        "minibatches=4": 40,
        "critic_steps=3": 60,  # of the critic
    }


def resumed_optimizers(folder: str) -> tuple[set[tuple[Any, ...]], dict[str, int]]:
    """Return (betas, weight decay, fused, Adam's step) of the parameter groups of a resumed optimizer, and
    the lengths of warm-ups.

    It has loaded the state of one with other settings. Runs on a rank, without the distributed optimizer.
    """
    process.prepare(engine=False)
    from megatron_stppo.model import build
    from megatron_stppo.parallel import groups
    from megatron_stppo.weights.sharding.hf_names import read_shape

    config = real_step.settings(folder, {}, {})
    mesh, shape = groups.initialize(config.parallel), read_shape(config.model.path)

    def trainer(
        role: Any = "actor", iterations: int = 10, steps: dict[str, int] | None = None, **own: Any
    ) -> Any:
        settings = config.update.optimizer(role).model_copy(update={"distributed": False} | own)
        config.update = config.update.model_copy(
            update={role: settings, "epochs": 2, "minibatches": 2, "critic_steps": 1} | (steps or {})
        )
        config.run.iterations = iterations
        return build.trainer(role, shape, config, mesh, torch.float32)

    saved = trainer(betas=(0.9, 0.95), weight_decay=0.01).optimizer.state_dict()
    resumed = trainer(betas=(0.5, 0.75), weight_decay=0.25)
    resumed.restore(saved, updates=7, skipped=0, memory={}, iterations=10)

    def warm_up(*given: Any, **own: Any) -> int:
        changed = trainer(*given, **{"warmup_fraction": 0.5} | own)
        changed.restore(None, updates=7, skipped=0, memory={}, iterations=10)
        assert changed.iterations == 10, "what the next checkpoint has"
        return int(changed.warmup)

    warm_ups = {
        "same": warm_up(),
        "more iterations": warm_up("actor", 100),
        "warmup_fraction=0": warm_up(warmup_fraction=0.0),
        "minibatches=4": warm_up("actor", 10, {"minibatches": 4}),
        "critic_steps=3": warm_up("critic", 10, {"critic_steps": 3}),
    }
    return {
        (*(group[name] for name in ("betas", "weight_decay", "fused")), float(state["step"]))
        for wrapped in resumed.optimizer.chained_optimizers
        for group in wrapped.optimizer.param_groups
        for state in (wrapped.optimizer.state[parameter] for parameter in group["params"])
    }, warm_ups
