"""The plan's bytes against those of a real update on gloo ranks."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.plan import real_step
from tests.ranks import run_ranks

CASES = {
    "tensor, sequence, full recomputation": ({"recompute": "full"}, {"tensor": 2, "sequence": True}),
    "pipeline of two chunks": ({}, {"pipeline": 2, "virtual": 2}),
    "data": ({}, {}),
}


@pytest.fixture(scope="module")
def both(model: Path, planner: ProcessPoolExecutor) -> dict[str, list[tuple[dict, dict]]]:
    """{case: per rank (measured, planned)}"""
    cases = [(str(model), *case) for case in CASES.values()]
    plans = planner.submit(real_step.planned, cases, 2)
    ranks = run_ranks(real_step.measured, 2, cases)
    return {
        name: [(ranks[rank][n], plans.result()[n][rank]) for rank in range(2)] for n, name in enumerate(CASES)
    }


@pytest.mark.parametrize("case", CASES)
def test_planned_memory_is_within_a_tenth_of_what_a_real_step_takes(case: str, both: dict) -> None:
    for measured, planned in both[case]:
        ratios = {phase: planned[phase] / measured[phase] for phase in measured}
        assert all(0.9 < ratio < 1.1 for ratio in ratios.values()), ratios
