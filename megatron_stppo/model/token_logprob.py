"""Log-probs of action tokens from a model's output: which columns of the vocabulary this rank holds."""

from __future__ import annotations

from torch import Tensor

from megatron_stppo import ops
from megatron_stppo.data.packing import Microbatch
from megatron_stppo.parallel.groups import Place


def token_logprob(
    logits: Tensor, microbatch: Microbatch, place: Place, vocab_size: int, temperature: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """(logprob, entropy, sum p^2), float32 [T] each, of a microbatch's action tokens from logits [T, V/TP].

    `vocab_size`: the true vocabulary; columns beyond it are megatron's padding.
    """
    return ops.vocab_logprob(
        logits,
        microbatch.target_T,
        vocab_start=place.tensor_rank * logits.shape[1],
        vocab_size=vocab_size,
        group=place.tensor_group,
        temperature=temperature,
        overwrite=True,  # the output layer does not look at its logits again
    )
