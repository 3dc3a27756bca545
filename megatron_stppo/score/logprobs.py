"""Log-probabilities of the batch's action tokens under a policy, vocabulary-parallel."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_stppo.model.pipeline import Packer, score
from megatron_stppo.model.policy_head import PolicyHead
from megatron_stppo.parallel.groups import Place
from megatron_stppo.types import Batch


def logprobs(
    model: torch.nn.Module, batch: Batch, place: Place, packer: Packer, vocab_size: int, temperature: float
) -> Tensor:
    """log pi(token) at the sampling temperature: float32 [T] on the host, equal on every rank."""

    head = PolicyHead.of(model, place, vocab_size, temperature)
    return score(model, batch, place, packer, head.logprob)
