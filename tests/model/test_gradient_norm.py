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
