from __future__ import annotations

import pytest

from megatron_stppo.base.errors import DoNotRestart, EngineLost
from megatron_stppo.rollout.vllm.generation import EngineFailure
from megatron_stppo.rollout.vllm.restart import Restarts


def failure(place: str) -> EngineFailure:
    return EngineFailure(f"vLLM failed: {place}", place)


def test_failures_are_counted_and_the_one_beyond_the_budget_is_raised() -> None:
    restarts, last = Restarts(budget=2), failure("c")
    restarts.admit(failure("a"), seed=1)
    restarts.admit(failure("b"), seed=1)
    with pytest.raises(EngineFailure) as raised:
        restarts.admit(last, seed=1)
    assert raised.value is last and restarts.count == 2


def test_a_failure_repeated_at_the_same_place_of_a_rollout_is_not_retried() -> None:
    restarts = Restarts(budget=9)
    restarts.admit(failure("ValueError at scheduler.py:310 in step 12"), seed=1)
    with pytest.raises(DoNotRestart, match=r"failed at the same place.*step 12"):
        restarts.admit(failure("ValueError at scheduler.py:310 in step 12"), seed=1)


def test_the_same_failure_after_a_successful_rollout_counts_as_new() -> None:
    restarts = Restarts(budget=9)
    restarts.admit(failure("in step 12"), seed=1)
    restarts.passed()
    restarts.admit(failure("in step 12"), seed=1)
    assert restarts.count == 2


def test_the_same_failure_in_another_rollout_or_step_counts_as_new() -> None:
    restarts = Restarts(budget=9)
    restarts.admit(failure("in step 12"), seed=1)
    restarts.admit(failure("in step 12"), seed=2)
    restarts.admit(failure("in step 13"), seed=2)
    assert restarts.count == 3


def test_a_failure_that_needs_a_new_process_is_a_requeue() -> None:
    with pytest.raises(EngineLost, match=r"^vLLM failed: in step 12$"):
        Restarts(budget=1, in_process=False).admit(failure("in step 12"), seed=1)
    with pytest.raises(EngineFailure):
        Restarts(budget=0, in_process=False).admit(failure("in step 12"), seed=1)
