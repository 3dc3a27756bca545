"""Log-probabilities of the batch's action tokens under a policy, vocabulary-parallel."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megatron_stppo.model.pipeline import Model, Packer, score
from megatron_stppo.model.policy_head import PolicyHead
from megatron_stppo.types import Batch


def logprobs(
    model: Model,
    head: PolicyHead,
    batch: Batch,
    packer: Packer,
    together: Sequence[Sequence[int]],
) -> Tensor:
    """Return log pi(token) at the head's temperature, float32 [T] on the host, equal on every rank.

    together: groups of trajectories that are packed into micro-batches together. Pass the minibatches of the
    update, which compares its log-probs with these.
    """
    return score(model, batch, packer, together, head.logprob)
