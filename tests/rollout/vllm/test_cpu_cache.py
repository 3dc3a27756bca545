from __future__ import annotations

import pytest

from megatron_stppo.config import ConfigError
from megatron_stppo.rollout.vllm.cpu_cache import GIB, check, machine_memory

PER_TOKEN = 2 * 2 * 2 * 32 * 4  # keys and values of 2 layers, 2 heads of 32, float32


def test_a_cache_that_the_machine_cannot_hold_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^rollout\.kv_cache_gib=500: 2 ranks share 16\.0 GiB .* at most 4$"
    ):
        check(500.0, 256, PER_TOKEN, ranks=2, memory=16 * GIB)
    check(4.0, 256, PER_TOKEN, ranks=2, memory=16 * GIB)


def test_a_cache_that_cannot_hold_one_trajectory_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"one trajectory of 1048576 tokens takes 1 GiB; choose more"):
        check(0.5, 2**20, 1024, ranks=1, memory=16 * GIB)


def test_the_machines_memory_is_at_least_what_this_process_may_have() -> None:
    assert GIB < machine_memory() < 2**50
