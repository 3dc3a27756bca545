"""Per-token rewards that the advantages are computed from: the environment's rewards minus the KL penalty."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatron_stppo.algorithm.penalties import KLEstimator, kl, overlong
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


def with_overlong_penalty(batch: Batch, first: int, last: int, most: float) -> Batch:
    """Return the batch whose rewards are reduced by `overlong` of the action tokens of an episode.

    The tokens of all histories of the episode count, without prompts and observations. Every history bears
    the penalty, at its last token, as it bears the reward.
    Example: first 2, last 4, most 1: an episode of 3 action tokens loses 0.5, one of 5 loses 1.
    """
    tokens_N = batch.action_offsets.diff()
    begins_N = torch.ones_like(batch.live_N) if batch.first_N is None else batch.first_N
    episode_N = begins_N.cumsum(0) - 1  # the histories of an episode follow its first
    length_N = torch.zeros_like(tokens_N).index_add(0, episode_N, tokens_N)[episode_N]
    acted_N, reward_T = tokens_N > 0, batch.reward_T.clone()
    reward_T[batch.action_offsets[1:][acted_N] - 1] -= overlong(length_N, first, last, most)[acted_N].float()
    return replace(batch, reward_T=reward_T)


def outcomes(reward_T: Tensor, action_offsets: Tensor) -> Tensor:
    """Return the sum of each trajectory's rewards, float64 [N]."""
    return segment_sum(reward_T.double(), action_offsets)
