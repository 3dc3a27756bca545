"""The command on two and four ranks, and with errors that only some layouts reveal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_stppo.cluster.launch import process
from tests.ranks import run_ranks
from tests.training.update import layouts


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("invariance")
    layouts.write_model(folder / "two_layers", "qwen3", num_hidden_layers=2)
    layouts.write_model(folder / "dense", "qwen3", num_hidden_layers=4)
    # a multiple of 8 times the largest tensor-parallel size
    layouts.write_model(folder / "experts", "qwen3_moe", num_hidden_layers=4, moe_intermediate_size=64)
    return folder


def check(
    model: str,
    output: str,
    parallel: dict[str, int],
    mistaken: bool = False,
    rank: int = 0,
) -> int:
    process.prepare(engine=False)
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megatron_stppo.config import Config
    from megatron_stppo.evidence.layouts.comparison import check_layouts

    if mistaken:
        make_mistakes()
    # the random offsets of the old policy also put some tokens beyond the bound of the mask
    algorithm = {
        "preset": "st_ppo",
        "kl_in": "loss",
        "kl_estimator": "k3",
        "kl_coefficient": 0.1,
        "mismatch": "mask",
    }
    model_section = {"path": model, "lora": {"rank": rank}}
    config = Config.model_validate({"model": model_section, "parallel": parallel, "algorithm": algorithm})
    broken = check_layouts(config, Path(output))
    left, of_last_case = dist.distributed_c10d._world.pg_map, parallel_state._global_process_group_list
    assert len(left) == len(of_last_case), "process groups of earlier cases are left"
    return broken


def make_mistakes() -> None:
    from megatron_stppo import ops
    from megatron_stppo.model import layers

    whole, start = ops.clipped_surrogate, layers.RMSNorm.__init__

    def alone(*arguments, group, **settings):  # each rank treats its part of a turn as the whole turn
        return whole(*arguments, **settings)

    def unmarked(
        norm, *arguments, **settings
    ):  # each rank treats its part of a gradient as the whole gradient
        start(norm, *arguments, **settings)
        norm.weight.sequence_parallel = False

    ops.clipped_surrogate, layers.RMSNorm.__init__ = alone, unmarked


# {(model, ranks): the axes that the cases must name}; two layers on four ranks have no chunks
AXES = {
    ("dense", 2): ("TP2", "SP", "CP2", "PP2", "VPP2", "DP2", "stages 1..", "reversed"),
    ("two_layers", 4): ("TP4", "SP", "CP4", "PP2", "DP4", "reversed"),
    ("dense", 4): ("TP4", "SP", "CP4", "PP4", "VPP2", "DP4", "stages 1..", "reversed"),
    ("experts", 4): ("TP4", "SP", "CP4", "PP4", "VPP2", "DP4", "stages 1..", "reversed", "EP2"),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "ranks"),
    [pytest.param(*case, marks=pytest.mark.long if case[1] == 4 else ()) for case in AXES],
)
def test_ranks_agree_under_every_layout(models: Path, tmp_path: Path, name: str, ranks: int) -> None:
    output, own = tmp_path / "cases.json", {"tensor": 2, "sequence": True}
    given = (str(models / name), str(output), own)
    assert run_ranks(check, ranks, *given, timeout=560) == [0] * ranks
    record = json.loads(output.read_text())
    names = [case["case"] for case in record["cases"]]
    assert len(names) == len(set(names)) >= 4 * ranks
    for axis in AXES[name, ranks]:
        assert any(axis in text for text in names), axis
    assert not any(case["broken"] for case in record["cases"])
    assert 0.05 < record["cases"][0]["numbers"]["actor/clip_fraction"] < 0.9


@pytest.mark.long
def test_adapters_agree_under_every_layout(models: Path, tmp_path: Path) -> None:
    output, own = tmp_path / "cases.json", {"tensor": 2, "sequence": True}
    given = (str(models / "dense"), str(output), own, False, 4)
    assert run_ranks(check, 4, *given, timeout=280) == [0] * 4
    cases = json.loads(output.read_text())["cases"]
    assert all("lora" in case["tensor"] for case in cases), "adapters are all that is compared"
    for axis in AXES["dense", 4]:
        assert any(axis in case["case"] for case in cases), axis


@pytest.mark.long
def test_missing_parts_of_a_turn_and_of_a_small_tensor_are_detected(models: Path, tmp_path: Path) -> None:
    output = tmp_path / "cases.json"
    broken = run_ranks(check, 2, str(models / "dense"), str(output), {"tensor": 2}, True)
    cases = {case["case"]: set(case["broken"]) for case in json.loads(output.read_text())["cases"]}
    context, sequence = ({name for name in cases if axis in name} for axis in ("CP2", "SP"))
    assert broken == [len(context | sequence)] * 2
    assert any("VPP2" in name for name in cases) and any("stages" in name for name in cases)
    for name, found in cases.items():
        assert ("actor/objective" in found) == (name in context)
        assert ("weights" in found) == (name in context | sequence)
        assert found or name not in context | sequence
