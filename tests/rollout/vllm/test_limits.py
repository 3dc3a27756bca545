"""Limits of an engine that need none: how often it is replaced, and the size of its cache on a CPU."""

from __future__ import annotations

import pytest

from megatron_stppo.base.errors import DoNotRestart, EngineLost
from megatron_stppo.config import ConfigError
from megatron_stppo.rollout.vllm.generation import EngineFailure, Restarts
from megatron_stppo.rollout.vllm.vllm_setup import GIB, check_cpu_cache, machine_memory

PER_TOKEN = 2 * 2 * 2 * 32 * 4  # keys and values of 2 layers, 2 heads of 32, float32


def test_a_cache_that_the_machine_cannot_hold_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^rollout\.kv_cache_gib=500: 2 ranks share 16\.0 GiB .* at most 4$"
    ):
        check_cpu_cache(500.0, 256, PER_TOKEN, ranks=2, memory=16 * GIB)
    check_cpu_cache(4.0, 256, PER_TOKEN, ranks=2, memory=16 * GIB)


def test_a_cache_that_cannot_hold_one_trajectory_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"one trajectory of 1048576 tokens takes 1 GiB; choose more"):
        check_cpu_cache(0.5, 2**20, 1024, ranks=1, memory=16 * GIB)


def test_the_machines_memory_is_at_least_what_this_process_may_have() -> None:
    assert GIB < machine_memory() < 2**50


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
