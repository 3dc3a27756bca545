"""The critic's value at every action token: the return that it predicts before the token is generated."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megatron_stppo.model.pipeline import Model, Packer, score
from megatron_stppo.types import Batch


def values(model: Model, batch: Batch, packer: Packer, together: Sequence[Sequence[int]]) -> Tensor:
    """Return the critic's values, float32 [T] on the host, equal on every rank.

    The value of a token is read from the hidden state that predicts the token. together: as in `logprobs`.
    """
    return score(model, batch, packer, together, lambda value_T, microbatch: value_T)
