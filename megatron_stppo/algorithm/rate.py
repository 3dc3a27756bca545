"""Controllers of the rate: a factor on the learning rate of each of the actor's optimizer steps.

constant:  1.
open_loop: a fixed factor for each step of an iteration. It reads nothing and is the baseline for the others.
kl:        the factor falls where the policy is far from the old one, and rises where it is near. Sources:
           Rudin et al., arXiv 2109.11978 (the adaptive rate of rsl_rl), and KLAdaptiveLR of torchrl.
           Differences: the factor is never above 1, so that the configured rate is the highest one, and it
           is not below 0.01.

A controller reads only numbers that are equal on every rank, and that are known before the step. Its state is
in StepMemory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from megatron_stppo.algorithm.penalties import k3

FACTOR = 1.5  # by which `kl` changes the rate
LOWEST = 0.01  # of the factor of `kl`
MOST_KL = 1.0  # nats that one token adds to the estimate for `kl`, at most


@dataclass(frozen=True)
class StepMemory:
    """Numbers that a step reads and that the steps taken before it have written. Equal on every rank.

    A checkpoint contains them, so that a resumed run takes the same steps. A step that is skipped or held
    changes nothing.

    Example: StepMemory() before the first step; StepMemory(2/3) after one that `rate: kl` has shortened.
    """

    rate_scale: float = 1.0  # the factor of algorithm.rate
    kl_after: float = 0.0  # actor/kl_after of the last update in which a step was applied
    deviation: float = 0.0  # mean over `whitened` batches of the advantages' deviation before whitening
    whitened: int = 0

    def with_deviation(self, deviation: float) -> Self:
        """Return the memory after another batch whose advantages were whitened."""
        mean = self.deviation + (deviation - self.deviation) / (self.whitened + 1)
        return replace(self, deviation=mean, whitened=self.whitened + 1)


@dataclass(frozen=True)
class RateInput:
    """What the controllers read before a step.

    Example: index 1 of 2 steps, last 1, KL 0.03 with target 0.01: the factor of `kl` is 1 / 1.5.
    """

    index: int  # of the step in its iteration, from 0
    steps: int  # of an iteration
    last: float  # factor of the last step that was taken; 1 before the first
    kl: float | None  # of `kl`: what measured_kl returns
    profile: Sequence[float] | None  # of `open_loop`: a factor for each step of an iteration
    target: float  # of `kl`, nats per token
    rises: bool = True  # of `kl`: whether this step may raise the factor, from may_rise


def open_loop(given: RateInput) -> float:
    """Return the profile's factor for this step of the iteration."""
    assert given.profile is not None
    return given.profile[given.index]


def kl(given: RateInput) -> float:
    """Return the last factor: / 1.5 if KL > 2 target, * 1.5 if KL < target / 2, clamped to [0.01, 1].

    Without a KL it stays.

    Example: target 0.01, KLs None, 0.03, 0.03, 0.004 from factor 1: 1, 2/3, 4/9, 2/3.
    """
    factor = given.last
    if given.kl is None:
        return factor
    if given.kl > 2 * given.target:
        factor /= FACTOR
    elif given.kl < given.target / 2 and given.rises:
        factor *= FACTOR
    return min(max(factor, LOWEST), 1.0)


def measured_kl(
    to_old: Callable[[], float], after: float, index: int, steps: int, from_engine: bool
) -> float | None:
    """Return KL(policy before, current policy) for `kl`, or None where no applied step is measured.

    Of several steps in an iteration, the first measures nothing and the later ones capped_kl to the policy at
    the iteration's start. If there is one step, or the old log-probs are the engine's, the first step reads
    what the whole update before it has done, and later ones measure nothing: a KL to the engine contains the
    difference of engine and trainer and the age of the rollouts, which no step has caused.

    to_old: capped_kl on the step's tokens. after: actor/kl_after of the last update with an applied step; 0
    without one. from_engine: algorithm.old_policy=behaviour.
    """
    if steps == 1 or from_engine:
        found = after if index == 0 else 0.0
    else:
        found = to_old() if index > 0 else 0.0
    return found if found > 0 else None  # 0: the steps before were not applied


def may_rise(rise: str, index: int, steps: int, from_engine: bool) -> bool:
    """Return whether `kl` may raise the factor before this step: "step": always; "iteration": once, where an
    iteration's KL is measured last.

    The KL of an iteration whose rewards hardly vary is nearly 0 at any rate, and eight steps of it multiply
    the factor by 1.5^7 = 17. The next iteration with a signal then takes its first steps at the full rate.
    Example: "iteration" with 4 steps and the old policy's log-probs of the trainer: index 3 only.
    """
    measured_last = 0 if steps == 1 or from_engine else steps - 1
    return rise == "step" or index == measured_last


# algorithm.rate
RATES: dict[str, Callable[[RateInput], float]] = {
    "constant": lambda given: 1.0,
    "open_loop": open_loop,
    "kl": kl,
}


def capped_kl(logprob_T: Tensor, old_logprob_T: Tensor, live_T: Tensor) -> float:
    """Return the mean of min(k3, MOST_KL) over the live tokens, nats per token; 0 without any.

    k3 grows with the ratio itself, so that without the cap one token decides: at a log ratio of 5.6 it adds
    0.004 to a mean over 65,000.

    Example: log ratios 0 and 5.6 give (0 + 1) / 2.
    """
    new_T, old_T = logprob_T[live_T].double(), old_logprob_T[live_T].double()
    return float(k3(old_T, new_T).clamp(max=MOST_KL).mean()) if len(new_T) else 0.0
