from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.evidence.checks import bench
from tests.ranks import run_ranks

WARM = {"warmup_fraction": 0.1}
UPDATE = {"actor": WARM, "critic": WARM}
BUGS = ("one_step_ahead", "norms_decay", "no_warmup", "norm_without_one", "skipped_tensor", "first_clipped")


def test_adamw_holds_and_every_planted_bug_is_found(tmp_path: Path) -> None:
    given = {"update": UPDATE}
    (found,) = run_ranks(bench.examine, 1, "optimizer", bench.write(tmp_path / "m"), ("", *BUGS), given)
    assert bench.verdicts(found) == {"": ["ok", "ok"]} | {name: ["fails", "fails"] for name in BUGS}, found
    assert "norm that clips" in found["norm_without_one"][0][1]
    assert "layernorm" in found["norms_decay"][0][1]


def test_every_number_of_a_large_tensor_can_be_sampled() -> None:
    """float32 has no number between 2^24 and 2^24 + 2."""
    from megatron_stppo.evidence.checks.adamw import OptimizerTensor

    master = torch.zeros(2**24 + 2)
    master.grad = torch.zeros_like(master)
    one = OptimizerTensor("embedding", master, master, 0, 1.0, True)
    one.begin()
    assert 0 <= int(one.at.min()) and int(one.at.max()) < len(master) and len(one.at.unique()) > 2000


@pytest.mark.parametrize(
    ("parallel", "family"), [({"tensor": 2, "sequence": True}, "qwen3_moe"), ({}, "qwen3")]
)
def test_shares_of_two_ranks_are_those_of_one_optimizer(tmp_path: Path, parallel: dict, family: str) -> None:
    """The second layout divides the optimizer's states over data-parallel ranks."""
    given = {"update": UPDATE, "parallel": parallel, "model": {"dtype": "bfloat16"}}
    names = ("", "skipped_tensor")
    found, other = run_ranks(bench.examine, 2, "optimizer", bench.write(tmp_path / "m", family), names, given)
    assert found == other
    assert bench.verdicts(found) == {"": ["ok", "ok"], "skipped_tensor": ["fails", "fails"]}, found


def test_adapters_and_the_value_head_are_all_that_is_trained(tmp_path: Path) -> None:
    given = {"update": UPDATE, "model": {"lora": {"rank": 2}}}
    (found,) = run_ranks(bench.examine, 1, "optimizer", bench.write(tmp_path / "m"), ("", "no_warmup"), given)
    assert bench.verdicts(found) == {"": ["ok", "ok"], "no_warmup": ["fails", "fails"]}, found
