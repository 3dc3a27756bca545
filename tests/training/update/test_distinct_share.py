"""How many of the trajectories' tokens an update computes: the metric update/distinct_share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.training.update import layouts, whole

# (ranks, parallel:)
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "data": (2, {}),
    "tensor_sequence": (2, {"tensor": 2, "sequence": True}),
    "virtual": (2, {"pipeline": 2, "virtual": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_share_is_of_all_steps_and_data_parallel_ranks_together(tmp_path: Path, case: str) -> None:
    """Steps and ranks save different shares here, and dummy tokens of pipelines and sequences are there."""
    world, parallel = CASES[case]
    layouts.write_model(tmp_path / "hf")
    found = run_ranks(whole.shared, world, str(tmp_path / "hf"), str(tmp_path), parallel)
    assert len(set(found)) == 1, "equal on every rank"
    measured, planned, expected = found[0]
    assert measured == planned == expected < 0.9


def test_context_parallelism_shares_nothing(tmp_path: Path) -> None:
    layouts.write_model(tmp_path / "hf")
    found = run_ranks(whole.shared, 2, str(tmp_path / "hf"), str(tmp_path), {"context": 2})
    assert {shares[:2] for shares in found} == {(1.0, 1.0)}
