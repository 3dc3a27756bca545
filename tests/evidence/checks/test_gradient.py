from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from megatron_stppo.evidence.checks.gradient import Direction, Slope
from tests.evidence.checks import bench
from tests.ranks import run_ranks

OF_ACTOR = (
    "first_cotangent",
    "missing_column",
    "ratio_of_one",
    "divided_by_microbatches",
    "constant_factor",
    "detached_embedding",
)
OF_CRITIC = ("constant_factor", "detached_value")
LORA = {"lora": {"rank": 2}}


def test_a_difference_counts_above_its_share_and_three_estimated_errors():
    assert Slope(1.0, 1.019, 0.0).holds and not Slope(1.0, 1.03, 0.0).holds
    assert Slope(1.0, 1.05, 0.02).holds  # 0.02 * 1.05 + 3 * 0.02 = 0.081
    assert not Slope(1.0, 3.0, 1.0).judged, "3 of 3 could be an error of the finite differences"
    assert Slope(0.0, 0.0, 1.0).judged and Slope(0.0, 0.0, 1.0).holds
    assert not Slope(0.0, 2.0, 0.1).holds, "a part without a gradient changes the objective"
    assert math.isclose(Slope(1.0, 1.1, 0.01).tolerance, 0.022 + 0.03)


class OneTensor:
    """What Direction uses of Counted, for one tensor that is the whole model."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def views(self, pieces: object, of: object) -> list[torch.Tensor]:
        return [self.weight]

    def dot(self, pieces: object, first: list[torch.Tensor], second: list[torch.Tensor]) -> float:
        return float((first[0].double() * second[0].double()).sum())


def test_no_step_goes_where_everything_is_clipped() -> None:
    """The weights have a norm of 1,000, and the objective is flat at a distance of 0.04 from them."""
    weight = torch.full((100,), 100.0)
    gradient = torch.full((100,), 2.5)  # a norm of 25
    f = lambda: float(((weight.double() - 100).sum() * 2.5).clamp(-1, 1))  # noqa: E731
    slope = Direction(OneTensor(weight), [None], [gradient], [gradient]).slope(f, 1.0)  # type: ignore[arg-type, list-item]
    assert slope.judged and slope.holds and slope.measured > 20, slope


@pytest.mark.parametrize(("role", "bugs"), [("actor", OF_ACTOR), ("critic", OF_CRITIC)])
def test_finite_differences_agree_and_every_planted_bug_is_found(
    tmp_path: Path, role: str, bugs: tuple[str, ...]
) -> None:
    model = bench.write(tmp_path / "m", num_hidden_layers=1)
    (found,) = run_ranks(bench.examine, 1, "gradient", model, ("", *bugs), {}, role)
    assert bench.verdicts(found) == {"": ["ok"]} | {name: ["fails"] for name in bugs}, found


@pytest.mark.parametrize(
    ("family", "given", "bug"),
    [
        pytest.param("qwen3_moe", {"parallel": {"tensor": 2, "sequence": True}}, "", marks=pytest.mark.long),
        pytest.param("qwen3", {}, "averaged", marks=pytest.mark.long),
        ("qwen3", {"parallel": {"tensor": 2, "sequence": True}, "model": LORA}, "unmarked_adapter"),
    ],
)
def test_two_ranks_judge_as_one(tmp_path: Path, family: str, given: dict, bug: str) -> None:
    names = tuple(dict.fromkeys(("", bug)))
    model = bench.write(tmp_path / "m", family, num_hidden_layers=1)
    found, other = run_ranks(bench.examine, 2, "gradient", model, names, given, "actor")
    assert found == other
    assert bench.verdicts(found) == {"": ["ok"]} | ({bug: ["fails"]} if bug else {}), found


def test_adapters_without_a_gradient_are_found(tmp_path: Path) -> None:
    """With full recomputation, an embedding without a gradient leaves all adapters without one."""
    names, given = ("", "detached_embedding"), {"model": LORA | {"recompute": "full"}}
    model = bench.write(tmp_path / "m", num_hidden_layers=1)
    (found,) = run_ranks(bench.examine, 1, "gradient", model, names, given, "critic")
    assert bench.verdicts(found) == {"": ["ok"], "detached_embedding": ["fails"]}, found
