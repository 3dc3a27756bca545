"""The critic's value at every action token: what it expects before the token is written."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megatron_stppo.model.pipeline import Model, Packer, score
from megatron_stppo.types import Batch


def values(model: Model, batch: Batch, packer: Packer, together: Sequence[Sequence[int]]) -> Tensor:
    """float32 [T] on the host, equal on every rank. Read from the same hidden state that predicts the
    token."""
    return score(model, batch, packer, together, lambda value_T, microbatch: value_T)
