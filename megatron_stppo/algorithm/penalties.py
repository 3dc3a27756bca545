"""Terms besides the surrogate: KL estimators, penalty of length, value loss, weights for a mismatch."""

from typing import Literal

import torch
from torch import Tensor

from megatron_stppo.algorithm.ratio import MAX_LOG_RATIO, Pooling, segment_ratio, spread

KLEstimator = Literal["k1", "k2", "k3"]


def overlong(length_N: Tensor, first: int, last: int, most: float) -> Tensor:
    """Return a penalty of long episodes, float64 [N]: 0 up to `first` tokens, `most` from `last` on, linear
    in between.

    Source: DAPO, arXiv 2503.14476, equation 13, with first = L_max - L_cache, last = L_max and most = 1.
    Example: first 100, last 200, most 0.5: lengths 100, 150, 200, 300 give 0, 0.25, 0.5, 0.5.
    """
    return most * ((length_N.double() - first) / (last - first)).clamp(0, 1)


def kl(estimator: KLEstimator, logprob_T: Tensor, reference_logprob_T: Tensor) -> Tensor:
    """Return a per-token estimate of KL(policy || reference) on tokens sampled from the policy.

    Raises ValueError for an unknown estimator.
    """
    estimators = {"k1": k1, "k2": k2, "k3": k3}
    if estimator not in estimators:
        raise ValueError(f"kl_estimator={estimator!r} is not known; choose k1, k2 or k3")
    return estimators[estimator](logprob_T, reference_logprob_T)


# The names are those of J. Schulman, "Approximating KL divergence" (2020). Used as a loss, k2 has the
# gradient of the KL. The gradient of k1 is zero in expectation, so k1 belongs in the reward.
def k1(logprob_T: Tensor, reference_logprob_T: Tensor) -> Tensor:
    """Return log pi - log ref: unbiased, positive or negative. Example: k1(-1, -3) = 2."""
    return logprob_T - reference_logprob_T


def k2(logprob_T: Tensor, reference_logprob_T: Tensor) -> Tensor:
    """Return (log pi - log ref)^2 / 2: biased, never negative. Example: k2(-1, -3) = 2."""
    return (logprob_T - reference_logprob_T).square() / 2


def k3(logprob_T: Tensor, reference_logprob_T: Tensor) -> Tensor:
    """Return ref/pi - 1 - log(ref/pi): unbiased, never negative.

    The exponent is clamped to at most 20; beyond that only the linear part changes.

    Example: k3(-1, -3) = exp(-2) - 1 + 2 = 1.135.
    """
    difference_T = reference_logprob_T - logprob_T
    return torch.expm1(difference_T.clamp(max=MAX_LOG_RATIO)) - difference_T


def weighted_sum(value_T: Tensor, weight_T: Tensor) -> Tensor:
    """Return sum c_t x_t over the tokens whose weight is not 0; the values of the others may be NaN.

    This makes a term of the loss from per-token entropy, KL or value error.
    """
    return (value_T.masked_fill(weight_T == 0, 0) * weight_T).sum()


def clipped_value_loss(value_T: Tensor, old_value_T: Tensor, return_T: Tensor, clip: float) -> Tensor:
    """Return 1/2 max( (V - R)^2, (clip(V, V_old +- clip) - R)^2 ) per token: the larger error, as in PPO.

    Example: V = 1, V_old = 0, R = 1, clip = 0.5: max(0, 0.25) / 2 = 0.125, with no gradient.
    """
    near_T = torch.clamp(value_T, old_value_T - clip, old_value_T + clip)
    return torch.maximum((value_T - return_T).square(), (near_T - return_T).square()) / 2


def mismatch_weight(
    kind: Literal["truncate", "mask"],
    old_logprob_T: Tensor,
    rollout_logprob_T: Tensor,
    offsets: Tensor | None,
    bound: float,
    lower: float | None = None,
    pooling: Pooling = "mean",
) -> tuple[Tensor, Tensor]:
    """Return (weight_T, ratio_T): the weight for train/serve mismatch, and the ratio m before it is bounded.

    m is the probability under the trainer's policy relative to the engine's: exp of the mean of old_logprob -
    rollout_logprob over the segment, with pooling="sum" of their sum. If offsets is None, every token is a
    segment.
    kind: truncate (TIS): min(m, bound). mask (MIS): m inside [lower, bound], 0 outside; lower=None: 1/bound.
    Raises ValueError for an unknown kind.

    Example: two tokens with log ratios of 1. mean: m = e. sum: m = e^2.
    """
    ratio_S, _ = segment_ratio(old_logprob_T, rollout_logprob_T, offsets, pooling)
    if kind == "truncate":
        weight_S = ratio_S.clamp(max=bound)
    elif kind == "mask":
        weight_S = ratio_S.masked_fill(
            (ratio_S > bound) | (ratio_S < (1 / bound if lower is None else lower)), 0
        )
    else:
        raise ValueError(f"mismatch={kind!r} is not known; choose truncate or mask")
    total = len(old_logprob_T)
    return spread(weight_S, offsets, total), spread(ratio_S, offsets, total)
