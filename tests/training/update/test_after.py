from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import run_ranks
from tests.training.update import layouts, whole


@pytest.mark.parametrize(
    ("ranks", "parallel", "least"),
    [
        (1, {}, 8),
        (1, {}, 2),
        (2, {}, 2),
        (2, {"pipeline": 2}, 2),
        (2, {"context": 2}, 2),
        (2, {"tensor": 2}, 8),
    ],
)
def test_the_divergence_of_an_update_contains_its_last_step(
    ranks: int, parallel: dict[str, int], least: int, tmp_path: Path
) -> None:
    """With two data-parallel ranks, each holds its own trajectories only. `least` 2: of half of the step."""
    layouts.write_model(tmp_path / "hf", num_hidden_layers=2)
    given = (str(tmp_path / "hf"), str(tmp_path), least, parallel)
    (row, before, after), *others = run_ranks(whole.moved, ranks, *given)
    assert all(other["actor/kl_after"] == row["actor/kl_after"] for other, _, _ in others)
    change = after - before
    expected = (change.exp() - 1 - change).clamp(max=1)
    assert len(expected) > 3 and row["actor/kl_after"] == pytest.approx(float(expected.mean()), rel=1e-4)
    assert row["actor/kl_after"] > row["actor/kl_to_old"] > 0, "the steps see the policy before the last one"
    removed = row["actor/removed_share"]  # of the second step: the first has ratios of 1 and clips nothing
    scale = 1 / max(1, 10 * removed / (1 - removed)) if removed < 1 else 1e-7
    assert 0 < removed and row["actor/effective_share"] == pytest.approx(scale)
