from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_stppo.cluster.launch import process
from tests.plan import real_step
from tests.ranks import run_ranks


def test_betas_and_weight_decay_come_from_the_configuration_and_not_from_a_checkpoint(tmp_path: Path) -> None:
    """A norm has no weight decay, whatever the configuration says."""
    real_step.write_model(tmp_path, "Qwen2")
    (found,) = run_ranks(groups_after_resuming, 1, str(tmp_path))
    assert found == {((0.5, 0.75), 0.25, True, 7.0), ((0.5, 0.75), 0.0, True, 7.0)}


def groups_after_resuming(folder: str) -> set[tuple[Any, ...]]:
    """Return (betas, weight decay, fused, Adam's step) of the parameter groups of a resumed optimizer.

    It has loaded the state of one with other settings. Runs on a rank, without the distributed optimizer.
    """
    process.prepare(engine=False)
    import torch

    from megatron_stppo.model import build
    from megatron_stppo.parallel import groups
    from megatron_stppo.weights.sharding.hf_names import read_shape

    config = real_step.settings(folder, {}, {})
    mesh, shape = groups.initialize(config.parallel), read_shape(config.model.path)

    def trainer(**changes: Any) -> Any:
        config.update.actor = config.update.actor.model_copy(update={"distributed": False} | changes)
        return build.trainer("actor", shape, config, mesh, torch.float32)

    saved = trainer(betas=(0.9, 0.95), weight_decay=0.01).optimizer.state_dict()
    resumed = trainer(betas=(0.5, 0.75), weight_decay=0.25)
    resumed.restore(saved, updates=7, skipped=0, warmup=0)
    return {
        (*(group[name] for name in ("betas", "weight_decay", "fused")), float(state["step"]))
        for wrapped in resumed.optimizer.chained_optimizers
        for group in wrapped.optimizer.param_groups
        for state in (wrapped.optimizer.state[parameter] for parameter in group["params"])
    }
