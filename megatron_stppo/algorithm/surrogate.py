"""The clipped surrogate over segments, its true derivative, and the part that clipping removed.

Source: ST-PPO, arXiv 2511.20718. With aggregation weight c_t, advantage A_t and the segment's ratio w_s
    J   = sum_s sum_{t in s} c_t min( w_s A_t, clip(w_s, 1-eps_low, 1+eps_high) A_t )            (maximised)
    g_u = dJ/dlogprob_u = (w_s/n_s) sum_{t in s, not clipped} c_t A_t
    b_u = (w_s/n_s) sum_{t in s, clipped} c_t A_t
g is the true derivative of J (Lemma 4.1 of the paper). A form that stops the gradient of w (GSPO-token, arXiv
2507.18071) is the same only if A is constant inside each segment. The tokens of a segment share w, so both
sums need only S+ = sum_{A>0} c A and S- = sum_{A<0} c A.

The bounds of a segment with n tokens are (1-eps_low)^(n^-p) and (1+eps_high)^(n^-p). In the paper p = 0. With
p = 1 they bound the probability of the whole segment, which changes by the factor w^n.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_stppo.algorithm.ratio import Pooling, ratio_of, segment_deltas, segment_sum, spread


@dataclass(frozen=True)
class Surrogate:
    """Objective, ratios and coefficients, in float64 unless noted.

    Example: one turn of two tokens, ratios 1.3 and 1.3, A = (1, -1), c = 1/2, clip 0.2: w = 1.3, S+ = 0.5,
    S- = -0.5, objective = 1.2*0.5 - 1.3*0.5 = -0.05, gradient_T = 1.3/2 * -0.5 = -0.325 for both tokens,
    bias_T = 1.3/2 * 0.5 = 0.325 for both, clipped_T = [True, False].
    """

    objective: Tensor  # 0-d
    ratio_S: Tensor  # in the inputs' dtype
    gradient_T: Tensor  # g_u
    bias_T: Tensor  # b_u
    clipped_T: Tensor  # bool; a token without weight is not clipped


def surrogate(
    logprob_T: Tensor,
    old_logprob_T: Tensor,
    advantage_T: Tensor,
    weight_T: Tensor,
    offsets: Tensor | None,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    clip_length_power: float = 0.0,
    pooling: Pooling = "mean",
    whole: Tensor | None = None,
) -> Surrogate:
    """Return J, g and b. Autograd records nothing.

    offsets: [S+1], the segments of T; None: every token is a segment.
    A token is clipped if (A > 0 and w > (1 + clip_high)^(n^-p)) or (A < 0 and w < (1 - clip_low)^(n^-p)),
    with the n tokens of its segment and p = clip_length_power.
    dual_clip: number > 1; dual_clip^(n^-p) is an upper bound of w where A < 0. It removes that part of the
    gradient, but the tokens do not count as clipped.
    whole: sum over ranks of segment_sums, if segments are split over ranks. The objective is then the share
    of this rank's tokens.
    A token of weight 0 contributes only to the ratio of its segment. Its advantage, and the ratio of a
    segment whose weights are all 0, may be NaN: such values are masked, not multiplied by zero.
    """
    total = len(logprob_T)
    low, high, dual = (
        _rounded(bound, logprob_T.dtype)
        for bound in (1 - clip_low, 1 + clip_high, math.inf if dual_clip is None else dual_clip)
    )
    part = segment_sums(logprob_T.detach(), old_logprob_T, advantage_T, weight_T, offsets)
    _, _, own_gain_S, own_loss_S = part.unbind(1)
    count_S, delta_S, gain_S, loss_S = (part if whole is None else whole).unbind(1)
    exact_S, divisor_S = ratio_of(delta_S, count_S, pooling)
    compared_S = compared(exact_S, count_S, clip_length_power, logprob_T.dtype)
    ratio_S = exact_S.to(logprob_T.dtype)
    w_S = ratio_S.double()

    # A NaN ratio fails these comparisons, so it is not clipped and reaches the gradient, which is checked.
    too_high_S, too_low_S, beyond_S = compared_S > high, compared_S < low, compared_S > dual
    high_S, low_S, dual_S = (bound**count_S**-clip_length_power for bound in (high, low, dual))
    of_gain_S = torch.where(too_high_S, high_S, w_S)
    of_loss_S = torch.where(beyond_S, dual_S, torch.where(too_low_S, low_S, w_S))
    objective = (_times(of_gain_S, own_gain_S) + _times(of_loss_S, own_loss_S)).sum()

    kept_S = gain_S.masked_fill(too_high_S, 0) + loss_S.masked_fill(too_low_S | beyond_S, 0)
    removed_S = gain_S.masked_fill(~too_high_S, 0) + loss_S.masked_fill(~too_low_S, 0)
    slope_S = w_S / divisor_S
    return Surrogate(
        objective=objective,
        ratio_S=ratio_S,
        gradient_T=spread(_times(slope_S, kept_S), offsets, total),
        bias_T=spread(_times(slope_S, removed_S), offsets, total),
        clipped_T=clipped(compared_S, advantage_T, weight_T, offsets, clip_low, clip_high),
    )


def compared(ratio_S: Tensor, count_S: Tensor, power: float, dtype: torch.dtype) -> Tensor:
    """Return the ratios as they are compared with the bounds of a single token: w^(n^power), [S].

    ratio_S, count_S: the ratios, not rounded, and the numbers of tokens, float64. The result is rounded to
    dtype, as the bounds are: a ratio that equals a bound in float32 is not clipped. w itself is not rounded
    first, because float32 has only 819 numbers between 1 and 1 + 0.2 / 2048.

    Example: w = 1.04 in a turn of 4 tokens with power 1 is compared as 1.17; a bound of 1.2 is not reached.
    """
    return (ratio_S**count_S**power).to(dtype)


def clipped(
    compared_S: Tensor,
    advantage_T: Tensor,
    weight_T: Tensor,
    offsets: Tensor | None,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """Return the mask of clipped tokens, bool [T]; tokens of weight 0 are not clipped.

    compared_S: what `compared` returns. A token is clipped if it is above 1+clip_high and A > 0, or below
    1-clip_low and A < 0. The bounds are rounded to its dtype.
    """
    total, dtype = len(advantage_T), compared_S.dtype
    too_high_T = spread(compared_S > _rounded(1 + clip_high, dtype), offsets, total) & (advantage_T > 0)
    too_low_T = spread(compared_S < _rounded(1 - clip_low, dtype), offsets, total) & (advantage_T < 0)
    return (too_high_T | too_low_T) & (weight_T != 0)


def decided(advantage_T: Tensor, weight_T: Tensor, offsets: Tensor | None) -> Tensor:
    """Return sum c A / sum c over each token's segment, in the inputs' dtype [T]; 0 for tokens of weight 0.

    In place of A it leaves J and its gradient as they are where nothing is clipped, because they depend on
    sum c A alone. But a segment is then clipped as a whole or not at all, by the sign of its own advantage.

    Example: a turn with A = (1, 1, -0.2), equal weights and w = 1.3. Token by token, 1 and 1 are clipped, and
    what is left lowers the probability of a turn whose advantage is 0.6. With 0.6 for each, all are clipped.
    """
    gain_S, loss_S = _signed_sums(advantage_T, weight_T, offsets)
    weight_S = segment_sum(weight_T.double(), offsets)
    mean_T = spread((gain_S + loss_S) / weight_S, offsets, len(advantage_T))
    return mean_T.masked_fill(weight_T == 0, 0).to(advantage_T.dtype)


def segment_sums(
    logprob_T: Tensor, old_logprob_T: Tensor, advantage_T: Tensor, weight_T: Tensor, offsets: Tensor | None
) -> Tensor:
    """Return number of tokens, sum of log ratios, S+ and S- of each segment, float64 [S, 4].

    Ranks that hold parts of the same segments add these up.
    """
    delta_S, count_S = segment_deltas(logprob_T, old_logprob_T, offsets)
    return torch.stack([count_S, delta_S, *_signed_sums(advantage_T, weight_T, offsets)], dim=1)


def _signed_sums(advantage_T: Tensor, weight_T: Tensor, offsets: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return S+ and S- of each segment. A NaN advantage with a nonzero weight makes S+ NaN."""
    product_T = (weight_T.double() * advantage_T.double()).masked_fill(weight_T == 0, 0)
    negative_T = advantage_T < 0
    return (
        segment_sum(product_T.masked_fill(negative_T, 0), offsets),
        segment_sum(product_T.masked_fill(~negative_T, 0), offsets),
    )


def _times(factor_S: Tensor, sum_S: Tensor) -> Tensor:
    """Return factor * sum where sum is not 0, else 0. A factor that is not used may be NaN."""
    return (factor_S * sum_S).masked_fill(sum_S == 0, 0)


def _rounded(bound: float, dtype: torch.dtype) -> float:
    """Return the bound rounded to the ratio's dtype. Example: 1.2 in float32 is 1.2000000477."""
    return float(torch.tensor(bound, dtype=dtype))
