"""A disk that is full while the first rank writes a model."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_stppo.config import ConfigError
from tests.ranks import run_ranks


def write_too_much(folder: Path) -> str:
    """Return the error of a rank. The first one may write files of at most 4 kB."""
    from megatron_stppo.checkpoint.convert import on_first
    from megatron_stppo.weights.sharding.hf_write import write_tensors

    if dist.get_rank() == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    (folder / "config.json").write_text("{}")
    tensors = {"a": torch.zeros(4096)}
    with pytest.raises(ConfigError) as raised:
        on_first(None, lambda: write_tensors(tensors, folder / "a.safetensors", folder / "config.json"))
    return str(raised.value)


def test_all_ranks_report_a_model_that_the_first_one_cannot_write(tmp_path: Path) -> None:
    first, second = run_ranks(write_too_much, 2, tmp_path)
    assert first == second and "File too large" in first
