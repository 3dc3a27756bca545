"""The critic's value at every action token: what it expects before the token is written."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_stppo.model.pipeline import Packer, score
from megatron_stppo.parallel.groups import Place
from megatron_stppo.types import Batch


def values(
    model: torch.nn.Module, batch: Batch, place: Place, packer: Packer, together: Sequence[Sequence[int]]
) -> Tensor:
    """float32 [T] on the host, equal on every rank. Read from the same hidden state that predicts the
    token."""
    return score(model, batch, place, packer, together, lambda value_T, microbatch: value_T)
