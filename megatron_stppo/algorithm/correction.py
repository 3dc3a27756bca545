"""The clipping-bias correction: the scale of a step when clipping removed a part of its gradient.

    C = sum_{t clipped} c_t w_s A_t grad log pi        (arXiv 2511.20718: the gradient is divided by ||C||)
Difference from the paper: the printed formula is undefined if nothing is clipped, and it amplifies the
gradient if ||C|| is small. Therefore
    scale = 1 if no token is clipped, else 1 / max(floor, strength ||C||).
With floor = 0 and strength = 1 this is the paper's formula.

||C|| has three estimators. `gradient` is exact in parameter space and takes a second backward pass. The other
two need no extra pass:
    logit:        sqrt( sum_u b_u^2 (1 - 2 p_u + sum_v p_v^2) )         exact in the space of the logits
    coefficient:  sqrt( sum_u b_u^2 )
They are converted to parameter space with the same estimate of the unclipped part:
    ||C|| ~ estimate(C) * ||grad J||_2 / estimate(grad J)
||grad J|| is replaced by the measured gradient norm of the whole loss, which includes the entropy and KL
terms, because the norm for J alone would take another backward pass. The two are close while those terms are
small compared with J.

In one step, squared_estimate is called for b and for g per micro-batch. The sums over micro-batches and ranks
are passed to calibrated_norm, in_unit and correction_scale, which work on plain numbers.
"""

import math
from typing import Literal

from torch import Tensor

Estimator = Literal["coefficient", "logit"]
Unit = Literal["mean", "sum", "relative"]
SMALLEST = 1e-30  # keeps a division by a norm finite
MOST = 1e6  # largest ||C|| relative to the remaining gradient, also where clipping left none


def squared_estimate(
    estimator: Estimator, coefficient_T: Tensor, logprob_T: Tensor, sum_p_sq_T: Tensor
) -> Tensor:
    """Return the square of the estimate for the coefficients b (of C) or g (of grad J), float64 0-d.

    The squares of several micro-batches or ranks can be added up. Raises ValueError for an unknown estimator.

    Example: one token with b = 2, p = 0.5, sum p^2 = 0.5: coefficient 4, logit 4 (1 - 1 + 0.5) = 2.
    """
    square_T = coefficient_T.detach().double().square()
    if estimator == "coefficient":
        return square_T.sum()
    if estimator == "logit":
        slope_T = 1 - 2 * logprob_T.detach().double().exp() + sum_p_sq_T.detach().double()
        # slope_T is below 0 only by rounding; a token whose coefficient is 0 may hold NaN
        return (square_T * slope_T.clamp(min=0)).masked_fill(square_T == 0, 0).sum()
    raise ValueError(f"correction={estimator!r} is not a free estimator; choose coefficient or logit")


def calibrated_norm(bias_sq: float, grad_sq: float, gradient_norm: float) -> float:
    """Return ||C|| from the squared estimates of C and grad J and the measured norm of the loss's gradient.

    The less gradient clipping leaves, the larger the result. Where C is MOST times what it leaves, or more,
    the result is MOST times gradient_norm, and at least the estimate of C itself.

    Example: bias_sq 4, grad_sq 1, gradient_norm 0.5 give 2 * 0.5 / 1 = 1. With grad_sq 0: 5e5. With
    gradient_norm 0 too: 2.
    """
    if bias_sq <= 0:  # at p = 1 rounding can push 1 - 2p + sum p^2 below zero
        return 0.0
    size, remaining = math.sqrt(bias_sq), math.sqrt(max(grad_sq, 0.0))
    if size >= MOST * remaining:
        return max(MOST * gradient_norm, size)
    return size / remaining * gradient_norm


def removed_share(bias_sq: float, grad_sq: float) -> float:
    """Return ||C|| / (||C|| + ||grad J||) from their squared estimates; 0 if both are 0."""
    size, remaining = math.sqrt(max(bias_sq, 0.0)), math.sqrt(max(grad_sq, 0.0))
    return size / (size + remaining) if size > 0 else 0.0


def in_unit(
    bias_norm: float, unit: Unit, *, tokens: float, weight: float = 1.0, gradient_norm: float = 0.0
) -> float:
    """Return ||C|| in the given unit.

    unit: "mean": as in the loss. "sum": for the loss as a sum over the minibatch's action tokens. "relative":
    as a multiple of the norm of the remaining gradient, at most MOST.
    tokens: number of action tokens of the minibatch. weight: sum of the loss's token weights, 1 if the loss
    is a mean. gradient_norm: norm of the loss's gradient. Raises ValueError for an unknown unit.

    Example: a loss that is the mean over 4 trajectories of sums over 25 tokens each has 100 tokens and weight
    25, so the sum is 4 times the loss. Relative to a gradient of norm 2, ||C|| = 0.5 is 0.25; this does not
    depend on the loss's scale.
    """
    if unit == "mean":
        return bias_norm
    if unit == "sum":
        return bias_norm * tokens / weight if weight > 0 else 0.0
    if unit == "relative":
        return min(bias_norm / max(gradient_norm, SMALLEST), MOST)
    raise ValueError(f"correction_unit={unit!r} is not known; choose mean, sum or relative")


def correction_scale(bias_norm: float, clipped_tokens: float, floor: float) -> float:
    """Return 1 if no token is clipped, else 1 / max(floor, bias_norm).

    bias_norm: ||C|| in its unit, times the strength. The result is also 1 if floor and bias_norm are both 0
    (all clipped tokens have weight 0).

    Example: floor 1 never amplifies: bias_norm 0.5 gives 1, bias_norm 4 gives 0.25. Floor 0 gives 2 and 0.25.
    """
    size = max(floor, bias_norm)
    return 1.0 if clipped_tokens == 0 or size == 0 else 1.0 / size
