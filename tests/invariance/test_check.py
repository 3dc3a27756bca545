"""The command on four ranks, and on a step with a mistake that only some layouts can show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_stppo.runtime import launch
from tests.ranks import run_ranks
from tests.update import layouts


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("invariance")
    for family in ("qwen3", "qwen3_moe"):
        layouts.write_model(folder / family, family)
    return folder


def check(model: str, output: str, parallel: dict[str, int], forget_context: bool = False) -> int:
    launch.prepare(engine=False)
    from megatron_stppo import ops
    from megatron_stppo.config import Config
    from megatron_stppo.invariance.check import compare

    if forget_context:
        whole = ops.clipped_surrogate

        def alone(*arguments, group, **settings):  # each rank takes its part of a turn for the turn
            return whole(*arguments, **settings)

        ops.clipped_surrogate = alone
    algorithm = {"kl_in": "loss", "kl_estimator": "k3", "kl_coefficient": 0.1}
    config = Config.model_validate({"model": {"path": model}, "parallel": parallel, "algorithm": algorithm})
    return compare(config, Path(output))


@pytest.mark.parametrize("family", ["qwen3", pytest.param("qwen3_moe", marks=pytest.mark.long)])
def test_four_ranks_agree_under_every_layout(models: Path, tmp_path: Path, family: str) -> None:
    output, own = tmp_path / "cases.json", {"tensor": 2, "sequence": True}
    assert run_ranks(check, 4, str(models / family), str(output), own, timeout=280) == [0] * 4
    record = json.loads(output.read_text())
    names = [case["case"] for case in record["cases"]]
    assert len(names) == len(set(names)) >= 20
    axes = ("TP4", "SP", "CP4", "PP4", "VPP2", "DP4", "stages 1..", "reversed")
    for axis in (*axes, "EP2") if family == "qwen3_moe" else axes:
        assert any(axis in name for name in names), axis
    assert not any(case["broken"] for case in record["cases"])
    assert 0.05 < record["cases"][0]["numbers"]["actor/clip_fraction"] < 0.9


def test_a_ratio_that_forgets_the_other_half_of_its_turn_is_found(models: Path, tmp_path: Path) -> None:
    output = tmp_path / "cases.json"
    broken = run_ranks(check, 2, str(models / "qwen3"), str(output), {"tensor": 2}, True)
    cases = json.loads(output.read_text())["cases"]
    assert broken == [1, 1]
    assert ["CP2" in case["case"] for case in cases] == [bool(case["broken"]) for case in cases]
    assert "actor/objective" in next(case["broken"] for case in cases if case["broken"])
