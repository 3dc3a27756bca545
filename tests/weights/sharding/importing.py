"""A function that runs on a rank: import a matrix that differs between the ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_stppo.config import ConfigError
from megatron_stppo.weights.sharding.hf_checkpoint import load_peft
from megatron_stppo.weights.sharding.tiles import PADDING, Span


def import_matrices(folder: Path) -> list[str]:
    """Import columns 1 and 2 of the matrix of this rank after a padding row, in float32 and float16.

    Return the messages of what is refused, and the digest of what is not.
    """
    key = f"model.layers.{dist.get_rank()}.self_attn.o_proj.lora_A.weight"
    spans = {"a": (Span(key, 1, 1, 2, 0), Span(PADDING, 1, 0, 1, 2))}
    held = {"a": torch.full((1, 3), 7.0)}
    digest = load_peft(folder / "good", spans, held)
    assert held["a"].tolist() == [[1e6, 2.0 + dist.get_rank(), 7.0]]
    said = []
    for name, dtype in (
        ("good", torch.float16),
        ("bad", torch.float32),
        ("cut", torch.float32),
        ("nowhere", torch.float32),
        (f"of rank {dist.get_rank()}", torch.float32),
    ):
        with pytest.raises(ConfigError) as error:
            load_peft(folder / name, spans, {"a": torch.zeros(1, 3, dtype=dtype)})
        said.append(str(error.value).replace(f"of rank {dist.get_rank()}", "two"))
    return [*said, digest]
