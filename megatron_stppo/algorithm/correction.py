"""The clipping-bias correction: how much less a minibatch weighs when clipping took part of it away.

    C = sum_{t clipped} c_t w_s A_t grad log pi        (arXiv 2511.20718: the gradient is divided by ||C||)
Where we differ: the printed formula is undefined when nothing is clipped and amplifies a small ||C||, hence
    scale = 1 if no token is clipped, else 1 / max(floor, strength ||C||);
floor = 0 and strength = 1 are the paper's literal form.
Estimators of ||C||: `gradient` (exact, in parameter space, by a second backward), and two free ones,
    logit:        sqrt( sum_u b_u^2 (1 - 2 p_u + sum_v p_v^2) )         exact in the space of the logits
    coefficient:  sqrt( sum_u b_u^2 )
brought to parameter space by the same norm of the unclipped part:
    ||C|| ~ estimate(C) * ||grad J||_2 / estimate(grad J)
For ||grad J|| stands the measured norm of the whole loss's gradient, entropy and KL terms included: J's own
would take a backward pass. The two are close while those terms are small beside J.
One step: squared_estimate of b and of g per microbatch; their sums over microbatches and ranks go to
calibrated_norm, in_unit and correction_scale, which are plain numbers.
"""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor

Estimator = Literal["coefficient", "logit"]
Unit = Literal["mean", "sum", "relative"]
SMALLEST = 1e-30  # keeps a division by a norm finite
MOST = 1e6  # ||C|| as a multiple of a gradient of which clipping left nothing: the step is as good as none


def squared_estimate(
    estimator: Estimator, coefficient_T: Tensor, logprob_T: Tensor, sum_p_sq_T: Tensor
) -> Tensor:
    """float64 0-d: the square of the estimate, for the coefficients b (of C) or g (of grad J). Adds up.

    Example: one token with b = 2, p = 0.5, sum p^2 = 0.5: coefficient 4, logit 4 (1 - 1 + 0.5) = 2.
    """
    square_T = coefficient_T.detach().double().square()
    if estimator == "coefficient":
        return square_T.sum()
    if estimator == "logit":
        slope_T = 1 - 2 * logprob_T.detach().double().exp() + sum_p_sq_T.detach().double()
        # never below 0 but for rounding; a token without coefficient may hold NaN
        return (square_T * slope_T.clamp(min=0)).masked_fill(square_T == 0, 0).sum()
    raise ValueError(f"correction={estimator!r} is not a free estimator; choose coefficient or logit")


def calibrated_norm(bias_sq: float, grad_sq: float, gradient_norm: float) -> float:
    """||C|| from the squared estimates of C and grad J, and the measured norm of the loss's gradient.

    Where nothing of the gradient survived clipping there is no calibration; the estimate itself stands in.
    Example: bias_sq 4, grad_sq 1, gradient_norm 0.5 give 2 * 0.5 / 1 = 1.
    """
    bias_sq = max(bias_sq, 0.0)  # at p = 1 rounding can push 1 - 2p + sum p^2 below zero
    if grad_sq <= 0 or gradient_norm <= 0:
        return math.sqrt(bias_sq)
    return math.sqrt(bias_sq / grad_sq) * gradient_norm


def in_unit(
    bias_norm: float, unit: Unit, *, tokens: float, weight: float = 1.0, gradient_norm: float = 0.0
) -> float:
    """||C|| as the loss has it ("mean"), of the sum over the minibatch's action tokens ("sum"), or as a
    multiple of the norm of the gradient that is left ("relative"), at most MOST; 0 where ||C|| is.

    weight: what the loss's token weights add up to, 1 if it is a mean. gradient_norm: of the loss. Example: a
    loss that is the mean over 4 trajectories of sums over 25 tokens each has 100 tokens and weight 25: the
    sum is 4 times the loss. Relative to a gradient of norm 2, ||C|| = 0.5 is 0.25, whatever the loss's scale.
    """
    if unit == "mean":
        return bias_norm
    if unit == "sum":
        return bias_norm * tokens / weight if weight > 0 else 0.0
    if unit == "relative":
        return min(bias_norm / max(gradient_norm, SMALLEST), MOST)
    raise ValueError(f"correction_unit={unit!r} is not known; choose mean, sum or relative")


def correction_scale(bias_norm: float, clipped_tokens: float, floor: float) -> float:
    """1 where nothing is clipped, else 1 / max(floor, bias_norm): ||C|| in its unit, times the strength.

    Example: floor 1 never amplifies: ||C|| = 0.5 gives 1, ||C|| = 4 gives 0.25. Floor 0 gives 2 and 0.25.
    With floor 0, clipped tokens whose bias vanishes (all weights 0) leave nothing to divide by: 1.
    """
    size = max(floor, bias_norm)
    return 1.0 if clipped_tokens == 0 or size == 0 else 1.0 / size
