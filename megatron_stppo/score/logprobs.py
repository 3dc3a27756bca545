"""Log-probabilities of the batch's action tokens under a policy, vocabulary-parallel."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_stppo.data.packing import Microbatch
from megatron_stppo.model.pipeline import Packer, score
from megatron_stppo.model.token_logprob import token_logprob
from megatron_stppo.parallel.groups import Place
from megatron_stppo.types import Batch


def logprobs(
    model: torch.nn.Module, batch: Batch, place: Place, packer: Packer, vocab_size: int, temperature: float
) -> Tensor:
    """log pi(token) at the sampling temperature: float32 [T] on the host, equal on every rank."""

    def answer(logits: Tensor, microbatch: Microbatch) -> Tensor:
        return token_logprob(logits, microbatch, place, vocab_size, temperature)[0]

    return score(model, batch, place, packer, answer)
