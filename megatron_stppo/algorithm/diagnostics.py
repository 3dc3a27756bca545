"""What a step reports about itself. Pure functions; those over moments take sums that add up over ranks."""

from __future__ import annotations

import torch
from torch import Tensor

QUANTILES = (0.0, 0.01, 0.5, 0.99, 1.0)


def ratio_quantiles(ratio_S: Tensor, quantiles: tuple[float, ...] = QUANTILES) -> dict[float, float]:
    """{q: the q-quantile}, interpolated linearly; 1 where there is no segment.

    Example: ratios (0.8, 1.0, 1.2) have minimum 0.8, median 1.0, maximum 1.2.
    """
    if len(ratio_S) == 0:
        return dict.fromkeys(quantiles, 1.0)
    # torch.quantile refuses more than 16M entries; sorting does not
    ordered = ratio_S.double().sort().values
    at = torch.tensor(quantiles, dtype=torch.float64, device=ordered.device) * (len(ordered) - 1)
    below = at.floor().long()
    above = (below + 1).clamp(max=len(ordered) - 1)
    values = torch.lerp(ordered[below], ordered[above], at - below)
    return dict(zip(quantiles, values.tolist(), strict=True))


def value_moments(value_T: Tensor, return_T: Tensor, live_T: Tensor) -> Tensor:
    """float64 [5] sums over live tokens: 1, R, R^2, R - V, (R - V)^2. Add up over parts of a batch."""
    target = return_T[live_T].double()
    error = target - value_T[live_T].double()
    sums = [torch.ones_like(target), target, target.square(), error, error.square()]
    return torch.stack([x.sum() for x in sums])


def explained_variance(moments: Tensor) -> float:
    """1 - Var(R - V) / Var(R): 1 for a perfect critic, 0 for a constant one; NaN where R does not vary.

    Example: R = (0, 1, 0, 1), V = (0.25, 0.75, 0.25, 0.75): Var(R) = 1/4, Var(R - V) = 1/16, hence 0.75.
    """
    count, target, target_sq, error, error_sq = moments.tolist()
    if count == 0:
        return float("nan")
    variance = target_sq / count - (target / count) ** 2
    # below this the variance is the rounding of the two terms it is the difference of
    if variance <= 1e-12 * target_sq / count:
        return float("nan")
    return float(1 - (error_sq / count - (error / count) ** 2) / variance)


def mismatch_moments(old_logprob_T: Tensor, rollout_logprob_T: Tensor, live_T: Tensor) -> Tensor:
    """float64 [4] sums over live tokens: 1, |d|, exp(d), exp(2d); d = trainer's - engine's log-prob."""
    difference = (old_logprob_T[live_T].double() - rollout_logprob_T[live_T].double()).clamp(-20, 20)
    sums = [torch.ones_like(difference), difference.abs(), difference.exp(), (2 * difference).exp()]
    return torch.stack([x.sum() for x in sums])


def mismatch_summary(moments: Tensor) -> tuple[float, float, float]:
    """(mean |difference|, mean weight before clamping, effective sample share (sum w)^2 / (n sum w^2)).

    Example: no mismatch gives (0, 1, 1).
    """
    count, absolute, weight, weight_sq = moments.tolist()
    if count == 0:
        return 0.0, 1.0, 1.0
    return absolute / count, weight / count, weight**2 / (count * weight_sq)
