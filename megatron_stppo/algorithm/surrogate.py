"""The clipped surrogate over segments, its true derivative, and the part that clipping removed.

Source: ST-PPO, arXiv 2511.20718. With aggregation weight c_t, advantage A_t and the segment's ratio w_s
    J   = sum_s sum_{t in s} c_t min( w_s A_t, clip(w_s, 1-eps_low, 1+eps_high) A_t )            (maximised)
    g_u = dJ/dlogprob_u = (w_s/n_s) sum_{t in s, not clipped} c_t A_t
    b_u = (w_s/n_s) sum_{t in s, clipped} c_t A_t
g is the true derivative of J (Lemma 4.1 of the paper). A form that stops the gradient of w (GSPO-token, arXiv
2507.18071) is the same only if A is constant inside each segment. The tokens of a segment share w, so both
sums need only S+ = sum_{A>0} c A and S- = sum_{A<0} c A.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_stppo.algorithm.ratio import Pooling, ratio_of, segment_count, segment_sum, spread


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
    pooling: Pooling = "mean",
    whole: Tensor | None = None,
) -> Surrogate:
    """Return J, g and b. Autograd records nothing.

    offsets: [S+1], the segments of T; None: every token is a segment.
    A token is clipped if (A > 0 and w > 1+clip_high) or (A < 0 and w < 1-clip_low).
    dual_clip: number > 1, an upper bound of w where A < 0. It removes that part of the gradient, but the
    tokens do not count as clipped.
    whole: sum over ranks of segment_sums, if segments are split over ranks. The objective is then the share
    of this rank's tokens.
    A token of weight 0 contributes only to the ratio of its segment. Its advantage, and the ratio of a
    segment whose weights are all 0, may be NaN: such values are masked, not multiplied by zero.
    """
    total = len(logprob_T)
    low, high = _rounded(1 - clip_low, logprob_T.dtype), _rounded(1 + clip_high, logprob_T.dtype)
    dual = None if dual_clip is None else _rounded(dual_clip, logprob_T.dtype)
    part = segment_sums(logprob_T.detach(), old_logprob_T, advantage_T, weight_T, offsets)
    _, _, own_gain_S, own_loss_S = part.unbind(1)
    count_S, delta_S, gain_S, loss_S = (part if whole is None else whole).unbind(1)
    ratio_S, divisor_S = ratio_of(delta_S, count_S, pooling, logprob_T.dtype)
    w_S = ratio_S.double()

    bound_S = w_S.clamp(min=low) if dual is None else w_S.clamp(min=low, max=dual)
    objective = (_times(w_S.clamp(max=high), own_gain_S) + _times(bound_S, own_loss_S)).sum()

    # A NaN ratio fails these comparisons, so it is not clipped and reaches the gradient, which is checked.
    too_high_S, too_low_S = w_S > high, w_S < low
    dropped_S = too_low_S if dual is None else too_low_S | (w_S > dual)
    kept_S = gain_S.masked_fill(too_high_S, 0) + loss_S.masked_fill(dropped_S, 0)
    removed_S = gain_S.masked_fill(~too_high_S, 0) + loss_S.masked_fill(~too_low_S, 0)
    slope_S = w_S / divisor_S
    return Surrogate(
        objective=objective,
        ratio_S=ratio_S,
        gradient_T=spread(_times(slope_S, kept_S), offsets, total),
        bias_T=spread(_times(slope_S, removed_S), offsets, total),
        clipped_T=clipped(ratio_S, advantage_T, weight_T, offsets, clip_low, clip_high),
    )


def clipped(
    ratio_S: Tensor,
    advantage_T: Tensor,
    weight_T: Tensor,
    offsets: Tensor | None,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """Return the mask of clipped tokens, bool [T]; tokens of weight 0 are not clipped.

    A token is clipped if (A > 0 and w > 1+clip_high) or (A < 0 and w < 1-clip_low). The bounds are rounded to
    the ratio's dtype.
    """
    total, dtype = len(advantage_T), ratio_S.dtype
    too_high_T = spread(ratio_S > _rounded(1 + clip_high, dtype), offsets, total) & (advantage_T > 0)
    too_low_T = spread(ratio_S < _rounded(1 - clip_low, dtype), offsets, total) & (advantage_T < 0)
    return (too_high_T | too_low_T) & (weight_T != 0)


def segment_sums(
    logprob_T: Tensor, old_logprob_T: Tensor, advantage_T: Tensor, weight_T: Tensor, offsets: Tensor | None
) -> Tensor:
    """Return number of tokens, sum of log ratios, S+ and S- of each segment, float64 [S, 4].

    Ranks that hold parts of the same segments add these up.
    """
    delta_S = segment_sum(logprob_T.double() - old_logprob_T.double(), offsets)
    gain_S, loss_S = _signed_sums(advantage_T, weight_T, offsets)
    return torch.stack([segment_count(offsets, delta_S), delta_S, gain_S, loss_S], dim=1)


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
