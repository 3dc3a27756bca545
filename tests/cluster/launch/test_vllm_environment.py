from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from megatron_stppo.cluster.launch.vllm_environment import prepare_environment, remove_stale_shared_memory


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
