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
    for name, family, layers in (
        ("two_layers", "qwen3", 2),
        ("dense", "qwen3", 4),
        ("experts", "qwen3_moe", 4),
    ):
        layouts.write_model(folder / name, family, num_hidden_layers=layers)
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


# which axes its cases must name; stages and chunks of two layers are on two ranks, below
AXES = {
    "two_layers": ("TP4", "SP", "CP4", "PP2", "DP4", "reversed"),
    "dense": ("TP4", "SP", "CP4", "PP4", "VPP2", "DP4", "stages 1..", "reversed"),
    "experts": ("TP4", "SP", "CP4", "PP4", "VPP2", "DP4", "stages 1..", "reversed", "EP2"),
}


@pytest.mark.parametrize(
    "name", ["two_layers", *(pytest.param(name, marks=pytest.mark.long) for name in ("dense", "experts"))]
)
def test_four_ranks_agree_under_every_layout(models: Path, tmp_path: Path, name: str) -> None:
    output, own = tmp_path / "cases.json", {"tensor": 2, "sequence": True}
    assert run_ranks(check, 4, str(models / name), str(output), own, timeout=280) == [0] * 4
    record = json.loads(output.read_text())
    names = [case["case"] for case in record["cases"]]
    assert len(names) == len(set(names)) >= 16
    for axis in AXES[name]:
        assert any(axis in text for text in names), axis
    assert not any(case["broken"] for case in record["cases"])
    assert 0.05 < record["cases"][0]["numbers"]["actor/clip_fraction"] < 0.9


def test_a_ratio_that_forgets_the_other_half_of_its_turn_is_found(models: Path, tmp_path: Path) -> None:
    output = tmp_path / "cases.json"
    broken = run_ranks(check, 2, str(models / "dense"), str(output), {"tensor": 2}, True)
    cases = json.loads(output.read_text())["cases"]
    assert broken == [1, 1]
    assert ["CP2" in case["case"] for case in cases] == [bool(case["broken"]) for case in cases]
    assert any("VPP2" in case["case"] for case in cases) and any("stages" in case["case"] for case in cases)
    assert "actor/objective" in next(case["broken"] for case in cases if case["broken"])
