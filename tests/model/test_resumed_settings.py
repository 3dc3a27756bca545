from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_stppo.cluster.launch import process
from tests.plan import real_step
from tests.ranks import run_ranks


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
        "a checkpoint without iterations": 5,
    }


def resumed_optimizers(folder: str) -> tuple[set[tuple[Any, ...]], dict[str, int]]:
    """Return (betas, weight decay, fused, Adam's step) of the parameter groups of a resumed optimizer, and
    the lengths of warm-ups.

    It has loaded the state of one with other settings. Runs on a rank, without the distributed optimizer.
    """
    process.prepare(engine=False)
    import torch

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
    resumed.restore(saved, updates=7, skipped=0, warmup=0)

    def warm_up(*given: Any, iterations: int | None = 10, **own: Any) -> int:
        changed = trainer(*given, **{"warmup_fraction": 0.5} | own)
        changed.restore(None, updates=7, skipped=0, warmup=5, iterations=iterations)
        assert changed.iterations == iterations, "what the next checkpoint has"
        return int(changed.warmup)

    warm_ups = {
        "same": warm_up(),
        "more iterations": warm_up("actor", 100),
        "warmup_fraction=0": warm_up(warmup_fraction=0.0),
        "minibatches=4": warm_up("actor", 10, {"minibatches": 4}),
        "critic_steps=3": warm_up("critic", 10, {"critic_steps": 3}),
        "a checkpoint without iterations": warm_up(iterations=None),
    }
    return {
        (*(group[name] for name in ("betas", "weight_decay", "fused")), float(state["step"]))
        for wrapped in resumed.optimizer.chained_optimizers
        for group in wrapped.optimizer.param_groups
        for state in (wrapped.optimizer.state[parameter] for parameter in group["params"])
    }, warm_ups
