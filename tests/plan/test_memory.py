"""Planned bytes compared with those of a real update on gloo ranks."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.plan import real_step
from tests.ranks import run_ranks

CASES = {
    "tensor, sequence, full recomputation": ({"recompute": "full"}, {"tensor": 2, "sequence": True}),
    "pipeline of two chunks": ({}, {"pipeline": 2, "virtual": 2}),
    "data, float32 masters, gradients set aside": ({"dtype": "bfloat16"}, {}, {"correction": "gradient"}),
    "experts": ({}, {"expert": 2}),
}


@pytest.fixture(scope="module")
def both(
    model: Path, planner: ProcessPoolExecutor, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[tuple[dict, dict]]]:
    """Return {case: [(measured, planned) of each rank]}."""
    experts: Path = tmp_path_factory.mktemp("experts")
    real_step.write_model(experts, "Qwen3Moe")
    cases = [(str(experts if name == "experts" else model), *case) for name, case in CASES.items()]
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
