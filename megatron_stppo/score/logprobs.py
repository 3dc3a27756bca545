"""Log-probabilities of the batch's action tokens under a policy, vocabulary-parallel."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_stppo import ops
from megatron_stppo.data.packing import Microbatch
from megatron_stppo.model.pipeline import Packer, score
from megatron_stppo.parallel.groups import Place
from megatron_stppo.types import Batch


def logprobs(
    model: torch.nn.Module, batch: Batch, place: Place, packer: Packer, vocab_size: int, temperature: float
) -> Tensor:
    """log pi(token) at the sampling temperature: float32 [T] on the host, equal on every rank."""

    def answer(logits: Tensor, microbatch: Microbatch) -> Tensor:
        logprob_T, _, _ = ops.vocab_logprob(
            logits,
            microbatch.target_T,
            vocab_start=place.tensor_rank * logits.shape[1],
            vocab_size=vocab_size,
            group=place.tensor_group,
            temperature=temperature,
        )
        return logprob_T

    return score(model, batch, place, packer, answer)
