"""Common prefixes computed once give the log-probs and gradients of whole trajectories, in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.training.update import layouts, trees

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "sequence": (2, {"tensor": 2, "sequence": True}),
    "pipeline": (2, {"pipeline": 2}),
    "virtual": (2, {"pipeline": 2, "virtual": 2}),
    "data": (2, {}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("trees")
    for family in ("qwen3", "gpt_oss"):
        layouts.write_model(root / family, family)
    return root


@pytest.mark.parametrize("budget", [1, 24, 1000])
@pytest.mark.parametrize(
    ("family", "layout"), [*(("qwen3", layout) for layout in LAYOUTS), ("gpt_oss", "one")]
)
def test_log_probs_and_gradients_are_those_of_whole_trajectories(
    family: str, layout: str, budget: int, models: Path
) -> None:
    ranks, parallel = LAYOUTS[layout]
    for found in run_ranks(trees.observe, ranks, str(models / family), parallel, budget):
        # megatron weighs experts in float32
        assert found["log-probs"] < 1e-12 and found["gradients"] < (1e-12 if family == "qwen3" else 1e-6), (
            found
        )
        assert found["parameters"] > 5 and found["least"] < 0
        whole, distinct = found["tokens"]
        assert distinct == whole if budget == 1 else distinct < whole or layout == "data"


def test_all_pipeline_stages_share_where_the_experts_of_all_layers_agree() -> None:
    assert run_ranks(trees.stages, 2) == [[[1, 2, 2, 2, 3, 4, 5, 6]]] * 2


def test_a_data_parallel_rank_gets_more_trajectories_if_they_share_their_prompt() -> None:
    assert run_ranks(trees.dealt, 1) == [[[0, 1, 2], [3]]]


def test_layouts_and_layers_that_cannot_share_prefixes_refuse_to() -> None:
    reasons = ("parallel.context=2", "TransformerEngine")
    assert run_ranks(trees.obstacles, 1) == [[(reason, "update.share_prefixes=on") for reason in reasons]]


def test_ranks_that_share_experts_have_equally_many_micro_batches() -> None:
    assert run_ranks(trees.with_experts, 2) == [[11, 11, 11], [11, 1, 1]], "dummy tokens on the second"


def test_microbatches_are_packed_once_for_all_models_while_what_decides_them_is_the_same() -> None:
    run_ranks(trees.kept, 1)
