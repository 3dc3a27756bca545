from __future__ import annotations

import mmap
import os
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_stppo.base.errors import ConfigError, Requeue
from megatron_stppo.cluster.launch import vllm_environment
from megatron_stppo.cluster.launch.vllm_environment import (
    check_variables,
    prepare_environment,
    remove_stale_shared_memory,
    wait_for_memory,
)
from tests.ranks import run_ranks


def test_only_old_unmapped_buffers_of_vllm_are_removed(tmp_path: Path) -> None:
    stale, fresh, other, mapped = (
        tmp_path / name
        for name in ("1-tp:0-cpushm_0", "2-tp:0-cpushm_0", "somebody_elses", "3-tp:0-cpushm_0")
    )
    for path in (stale, fresh, other, mapped):
        path.write_bytes(b"\0" * mmap.PAGESIZE)
    for path in (stale, other, mapped):
        os.utime(path, (0, 0))
    with mapped.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        assert remove_stale_shared_memory(tmp_path) == [stale]
    assert sorted(tmp_path.iterdir()) == sorted([fresh, other, mapped])
    assert remove_stale_shared_memory(tmp_path) == [mapped], "its process has unmapped it"


def test_a_buffer_that_cannot_be_removed_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is another user's: /dev/shm lets only the owner of a file delete it."""
    foreign, own = tmp_path / "1-tp:0-cpushm_0", tmp_path / "2-tp:0-cpushm_0"
    for path in (foreign, own):
        path.touch()
        os.utime(path, (0, 0))
    unlink = Path.unlink

    def only_own(path: Path) -> None:
        if path == foreign:
            raise PermissionError("not permitted")
        unlink(path)

    monkeypatch.setattr(Path, "unlink", only_own)
    assert remove_stale_shared_memory(tmp_path) == [own] and foreign.exists()


def test_a_users_logging_level_is_kept_and_the_engine_stays_in_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    for name in ("VLLM_NO_USAGE_STATS", "VLLM_CPU_OMP_THREADS_BIND", "TORCHDYNAMO_DISABLE"):
        monkeypatch.setenv(name, "given")  # so that monkeypatch restores the old value
    prepare_environment()
    assert os.environ["VLLM_LOGGING_LEVEL"] == "INFO"
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


def waited(of_ranks: list[list[int]]) -> tuple[int, str]:
    """Wait for 48 of 80 GiB. Return (looks, error).

    of_ranks: the GiB that each look of each rank finds free.
    """
    free = of_ranks[dist.get_rank()]
    looks = mock.Mock(side_effect=[(gib << 30, 80 << 30) for gib in free])
    pause, tries = mock.patch.object(vllm_environment, "MEMORY_PAUSE", 0), len(free)
    with mock.patch.object(torch.cuda, "mem_get_info", looks), pause:
        with mock.patch.object(vllm_environment, "MEMORY_TRIES", tries):
            try:
                wait_for_memory(0.6)
            except Requeue as error:
                return looks.call_count, str(error)
    return looks.call_count, ""


def test_all_ranks_wait_until_a_process_that_is_dying_has_left_its_gpu() -> None:
    assert run_ranks(waited, 2, [[79, 79, 79], [3, 40, 49]]) == [(3, ""), (3, "")]


def test_memory_that_is_not_free_after_a_minute_requeues_the_run_on_all_ranks() -> None:
    assert vllm_environment.MEMORY_TRIES * vllm_environment.MEMORY_PAUSE > 60
    ((looks, error), other) = run_ranks(waited, 2, [[79, 79], [3, 47]])
    assert other == (looks, error) and looks == 2 and Requeue.exit_code == 85
    assert "gpu_memory_utilization=0.6 of every GPU" in error
    assert "rank 1: 47.0 of 80.0 GiB are free; end other processes" in error


def test_variables_with_which_an_engine_of_several_ranks_cannot_start_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("VLLM_DISTRIBUTED_USE_SPLIT_GROUP", "0")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512,expandable_segments:True")
    check_variables(1)  # nothing is shared
    with pytest.raises(
        ConfigError, match=r"^PYTORCH_CUDA_ALLOC_CONF=.*:True: an engine of 2 ranks .*; unset"
    ):
        check_variables(2)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    check_variables(2)
    monkeypatch.setenv("VLLM_DISTRIBUTED_USE_SPLIT_GROUP", "1")
    with pytest.raises(
        ConfigError, match=r"^VLLM_DISTRIBUTED_USE_SPLIT_GROUP: cannot be used here; unset it$"
    ):
        check_variables(1)
