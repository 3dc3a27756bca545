"""Per-token rewards that the advantages are computed from: the environment's rewards minus the KL penalty."""

from __future__ import annotations

from torch import Tensor

from megatron_stppo.algorithm.penalties import KLEstimator, kl
from megatron_stppo.algorithm.ratio import segment_sum
from megatron_stppo.base.types import Batch


def with_kl_penalty(batch: Batch, coefficient: float, estimator: KLEstimator = "k1") -> Tensor:
    """Return reward_T - coefficient * KL(old policy || reference) as estimated per token, float32 [T].

    Raises ValueError if the coefficient is not 0 and the batch lacks old or reference log-probs.
    Example: reward 1, old -1, reference -3, coefficient 0.1: 1 - 0.1 * 2 = 0.8.
    """
    if coefficient == 0:
        return batch.reward_T
    if batch.old_logprob_T is None or batch.reference_logprob_T is None:
        raise ValueError(
            f"kl_coefficient={coefficient} needs old and reference log-probs; score the batch first"
        )
    return batch.reward_T - coefficient * kl(estimator, batch.old_logprob_T, batch.reference_logprob_T)


def outcomes(reward_T: Tensor, action_offsets: Tensor) -> Tensor:
    """Return the sum of each trajectory's rewards, float64 [N]."""
    return segment_sum(reward_T.double(), action_offsets)
