from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import run_ranks
from tests.update import faults, layouts


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model") / "hf"
    layouts.write_model(folder)
    return str(folder)


def test_a_nan_on_one_rank_skips_the_step_on_all_and_leaves_weights_and_optimizer_untouched(
    model: str,
) -> None:
    assert run_ranks(faults.step_on_nan, 2, model) == [(1.0, True, 1)] * 2


def test_a_flipped_byte_falls_back_to_the_older_step_and_two_are_refused(model: str, tmp_path: Path) -> None:
    ((iteration, complaint),) = run_ranks(faults.load_after_damage, 1, model, str(tmp_path))
    assert iteration == 1
    assert "step_2" in complaint and "step_1" in complaint and "does not match the manifest" in complaint
