"""What the optimizer steps of the actor pass on to later steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepMemory:
    """Numbers that a step reads and that the steps taken before it have written. Equal on every rank.

    A checkpoint contains them, so that a resumed run takes the same steps. A step that is skipped or held
    changes nothing.

    Example: StepMemory() before the first step; StepMemory(2/3, 0.5, 1) after one step of norm 0.5 that
    `rate: kl` has shortened.
    """

    rate_scale: float = 1.0  # the factor of algorithm.rate
    norm_mean: float = 0.0  # running mean of gradient norms
    norms: int = 0  # number of values in it
    kl_after: float = 0.0  # actor/kl_after of the last update in which a step was applied
