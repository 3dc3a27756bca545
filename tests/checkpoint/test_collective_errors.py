"""Errors of torch's distributed checkpoints are exceptions with one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint

from megatron_stppo.checkpoint.collective_errors import as_exception
from megatron_stppo.checkpoint.step_folder import CheckpointError


def test_a_load_that_torch_refuses_is_a_checkpoint_error(tmp_path: Path) -> None:
    checkpoint.save({"a": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(CheckpointError) as raised, as_exception("step_1: cannot be loaded", CheckpointError):
        checkpoint.load({"b": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    said = str(raised.value)
    assert said.startswith("step_1: cannot be loaded (rank 0: RuntimeError: Missing key") and "\n" not in said
