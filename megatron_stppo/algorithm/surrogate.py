"""The clipped surrogate over segments, its true derivative, and what clipping removed.

Source: ST-PPO, arXiv 2511.20718. With aggregation weight c_t, advantage A_t and the segment's ratio w_s
    J   = sum_s sum_{t in s} c_t min( w_s A_t, clip(w_s, 1-eps_low, 1+eps_high) A_t )            (maximised)
    g_u = dJ/dlogprob_u = (w_s/n_s) sum_{t in s, not clipped} c_t A_t
    b_u = (w_s/n_s) sum_{t in s, clipped} c_t A_t
Where we differ: g is the true derivative of J; the papers' stop-gradient form agrees only while A is constant
inside a segment. The tokens of a segment share w, so both sums need only S+ = sum_{A>0} c A and
S- = sum_{A<0} c A.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_stppo.algorithm.ratio import Pooling, ratio_of, segment_count, segment_sum, spread


@dataclass(frozen=True)
class Surrogate:
    """Sums and coefficients in float64.

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
    """Evaluates J, g and b; nothing here is recorded by autograd.

    offsets [S+1] cut T into segments, None: token level. A token is clipped iff (A > 0 and w > 1+clip_high)
    or (A < 0 and w < 1-clip_low), strictly. dual_clip > 1 bounds w from above where A < 0, which removes that
    part of the gradient without counting as clipped.
    A token of weight 0 takes part in its segment's ratio only; its advantage, and the ratio of a segment
    without any weight, may be NaN: they are selected away, never multiplied by zero.
    whole: the segment_sums of all ranks added up, where these tokens are parts of segments split over ranks;
    the objective is then this part's share.
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

    # Conditions are written so that a NaN ratio is not clipped and reaches the gradient, where it is noticed.
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
    """bool [T]: (A > 0 and w > 1+clip_high) or (A < 0 and w < 1-clip_low), where there is weight. The bounds
    are rounded to the ratio's dtype."""
    total, dtype = len(advantage_T), ratio_S.dtype
    too_high_T = spread(ratio_S > _rounded(1 + clip_high, dtype), offsets, total) & (advantage_T > 0)
    too_low_T = spread(ratio_S < _rounded(1 - clip_low, dtype), offsets, total) & (advantage_T < 0)
    return (too_high_T | too_low_T) & (weight_T != 0)


def segment_sums(
    logprob_T: Tensor, old_logprob_T: Tensor, advantage_T: Tensor, weight_T: Tensor, offsets: Tensor | None
) -> Tensor:
    """float64 [S, 4]: tokens, sum of log ratios, S+, S-; added up by ranks that hold parts of segments."""
    delta_S = segment_sum(logprob_T.double() - old_logprob_T.double(), offsets)
    gain_S, loss_S = _signed_sums(advantage_T, weight_T, offsets)
    return torch.stack([segment_count(offsets, delta_S), delta_S, gain_S, loss_S], dim=1)


def _signed_sums(advantage_T: Tensor, weight_T: Tensor, offsets: Tensor | None) -> tuple[Tensor, Tensor]:
    """S+ and S- per segment. A NaN advantage that carries weight lands in S+ and stays visible."""
    product_T = (weight_T.double() * advantage_T.double()).masked_fill(weight_T == 0, 0)
    negative_T = advantage_T < 0
    return (
        segment_sum(product_T.masked_fill(negative_T, 0), offsets),
        segment_sum(product_T.masked_fill(~negative_T, 0), offsets),
    )


def _times(factor_S: Tensor, sum_S: Tensor) -> Tensor:
    """The product where sum is not zero, else 0: an unused factor may be NaN."""
    return (factor_S * sum_S).masked_fill(sum_S == 0, 0)


def _rounded(bound: float, dtype: torch.dtype) -> float:
    """A bound as the ratio's dtype holds it. Example: 1.2 in float32 is 1.2000000477."""
    return float(torch.tensor(bound, dtype=dtype))
