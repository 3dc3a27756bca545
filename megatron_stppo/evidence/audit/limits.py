"""How far the engine's log-prob of a token may be from the trainer's: limits of `audit`.

Engine and trainer multiply the same weights in another order and round in other places. What this does to a
log-prob depends on the token: a model with sharp attention amplifies a difference of one rounding a hundred
times and more at some tokens. So the trainer scores each token again under weights that are *nudged*: every
weight is multiplied by a random factor between 1 - eps and 1 + eps, where eps is that of the dtype. A
computation with rounded intermediate results is the exact computation with slightly other weights (backward
error), so a nudge moves a log-prob about as much as rounding does.

The limit of a token is FACTOR * (n + m + eps * (z + |log-prob|)):

- n: how far the nudges move its log-prob at most. m: the mean of n over the tokens of the version, because
  the two nudges of every token can leave one of them where it was by chance.
- z: the largest absolute logit. The two log-probs are differences of a logit and a logarithm of a sum, and
  each of these numbers is rounded to eps times its size.

No recorded number enters the limit, so a fault cannot widen it. A token beyond it is scored under MORE
nudges first. The mean difference of a version must be at most MEAN times the mean of the bracket.

Measured on runs without a fault (docs/audit.md): with 18 nudges, the largest difference of 30,000 tokens is
1.2 brackets; with two, the largest mean of a version is 0.5 mean brackets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_stppo.data.packing import Microbatch
from megatron_stppo.model.policy_head import PolicyHead

NUDGES, MORE = 2, 16  # of every token, and of those that seem to differ
FACTOR, MEAN = 3.0, 1.5
# If more tokens than FEW and this share of all seem to differ, it is no accident of two nudges.
FEW, MANY = 10, 0.05
# Two versions are compared if there are that many trajectories and tokens.
TRAJECTORIES, TOKENS = 20, 100
# The standard error of 20 trajectories is itself uncertain. Six are exceeded by chance in 5 of a million
# comparisons (Student's t with 19 degrees of freedom), and a run of 1,000 iterations has 2,000.
RESEMBLES, DEVIATIONS = 0.1, 6.0


@contextmanager
def nudging(model: Sequence[torch.nn.Module], eps: float) -> Iterator[Callable[[int], None]]:
    """Yield a function that multiplies every weight by a random factor of 1 - eps to 1 + eps.

    Its argument is the seed. The factors of the previous call are undone. The weights are restored at the
    end. All ranks use the same factors for weights of the same place, so that copies stay equal.
    """
    weights = [weight for chunk in model for weight in chunk.parameters()]
    kept = [weight.detach().to("cpu", copy=True) for weight in weights]

    def nudge(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for weight, own in zip(weights, kept, strict=True):
            noise = torch.empty(own.shape).uniform_(-eps, eps, generator=generator)
            weight.copy_(torch.addcmul(own.float(), own.float(), noise))

    with torch.no_grad():
        try:
            yield nudge
        finally:
            for weight, own in zip(weights, kept, strict=True):
                weight.copy_(own)


def largest_logits(head: PolicyHead) -> Callable[[Tensor, Microbatch], Tensor]:
    """Return a function for `score` that returns the largest abs(logit / temperature) of every token [T]."""

    def largest(hidden: Tensor, microbatch: Microbatch) -> Tensor:
        assert head.weight is not None, "the last pipeline stage has the head"
        own = head.weight[: max(0, head.vocab_size - head.mesh.tensor_rank * len(head.weight))]
        chunks = [(rows @ own.T).abs().amax(-1) for rows in hidden.split(head.chunk)]
        found_T = torch.cat(chunks).float() / head.temperature
        dist.all_reduce(found_T, dist.ReduceOp.MAX, group=head.mesh.tensor_group)
        return found_T

    return largest


def roundings(moved_T: Tensor, logprob_T: Tensor, logit_T: Tensor, eps: float) -> Tensor:
    """Return the size of rounding for each token of a version: the bracket above, in nats, [T].

    moved_T: how far nudges move the log-prob at most.
    Example: moved (0, 2e-6), log-probs (-1, -3), logits of at most 5 and eps=1e-7 give (0 + 1e-6 + 6e-7,
    2e-6 + 1e-6 + 8e-7).
    """
    return moved_T + moved_T.mean() + eps * (logit_T + logprob_T.abs())


@dataclass(frozen=True)
class Resemblance:
    """How much the engine's log-probs are those of another version: 0 not at all, 1 wholly.

    Example: Resemblance(0.02, 0.01).
    """

    share: float
    error: float  # standard error of the share

    @property
    def least(self) -> float:
        """What the share is at least."""
        return self.share - DEVIATIONS * self.error

    @property
    def differs(self) -> bool:
        return self.least > RESEMBLES


def resemblance(
    named_T: Tensor, nudged_T: Tensor, other_T: Tensor, engine_T: Tensor, sequence_T: Tensor
) -> Resemblance | None:
    """Return how much the engine's log-probs are those of another version; None if nothing can be compared.

    The trainer's log-probs under the version that the tokens name, under this version nudged, and under the
    other version; sequence_T numbers the trajectories. The share is the least-squares b in
    (named - engine) = b * (named - other). Rounding errors of `named` are in both sides and would raise it,
    so one factor uses the nudged log-probs instead. The error is over trajectories, whose tokens depend on
    each other.
    Example: engine = other gives a share of 1, engine = named gives 0.
    """
    named_T, nudged_T, other_T, engine_T = (x.double() for x in (named_T, nudged_T, other_T, engine_T))
    away_T, step_T = nudged_T - other_T, named_T - other_T
    trajectories, index_T = torch.unique(sequence_T, return_inverse=True)
    if len(trajectories) < TRAJECTORIES or len(named_T) < TOKENS:
        return None

    def per_trajectory(x_T: Tensor) -> Tensor:
        return torch.zeros(len(trajectories), dtype=torch.float64).index_add_(0, index_T, x_T)

    over_N, under_N = per_trajectory((named_T - engine_T) * away_T), per_trajectory(step_T * away_T)
    under = float(under_N.sum())
    if not under > 0:  # equal weights, or a difference that is smaller than rounding
        return None
    share = float(over_N.sum()) / under
    return Resemblance(share, float((over_N - share * under_N).norm()) / under)
