"""How far the engine's log-prob of a token may be from the trainer's: limits of `audit` and `verify`.

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
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_stppo.base.types import Batch
from megatron_stppo.cluster.launch import process
from megatron_stppo.data.packing import Microbatch
from megatron_stppo.model.learner import Learner
from megatron_stppo.model.pipeline import forward_only, gather
from megatron_stppo.model.policy_head import PolicyHead
from megatron_stppo.observe.metrics import progress

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


@dataclass
class Piece:
    """Trajectories of one iteration with tokens of one version, which are scored together."""

    learner: Learner  # with the settings of the iteration
    batch: Batch
    own_T: Tensor  # bool [T]: the tokens of the version
    lines: Sequence[int]  # of the iteration's file, from 1
    iteration: int
    under: dict[int, Tensor] = field(default_factory=dict)  # {version: log-probs of own tokens under it}

    @classmethod
    def of(cls, learner: Learner, batch: Batch) -> Piece:
        """Return the piece of all tokens of a batch that was just played."""
        every_T = torch.ones_like(batch.version_T, dtype=torch.bool)
        return cls(learner, batch, every_T, list(range(len(batch.live_N))), 0)

    def logprobs(self) -> Tensor:
        """Return the log-probs of the own tokens under the weights that are loaded, float32. Collective."""
        return self._answers(PolicyHead.logprob)

    def logprobs_and_logits(self) -> tuple[Tensor, Tensor]:
        """Return `logprobs`, and the largest abs(logit / temperature) of the own tokens. Collective."""
        microbatches, largest = list[Microbatch](), list[Tensor]()

        def answer(head: PolicyHead, hidden: Tensor, microbatch: Microbatch) -> Tensor:
            microbatches.append(microbatch)
            largest.append(_largest_logits(head, hidden))
            return head.logprob(hidden, microbatch)

        logprob_T, mesh = self._answers(answer), self.learner.mesh
        return logprob_T, gather(microbatches, largest, len(self.own_T), mesh)[self.own_T]

    def _answers(self, answer: Callable[[PolicyHead, Tensor, Microbatch], Tensor]) -> Tensor:
        policy, packer = self.learner.policy, self.learner.packer
        of_head, every = partial(answer, self.learner.head(policy)), [packer.whole(self.batch)]
        return forward_only(policy, self.batch, packer, every, of_head)[self.own_T]

    @property
    def engine_T(self) -> Tensor:
        return self.batch.rollout_logprob_T[self.own_T]

    @property
    def sequence_T(self) -> Tensor:
        """The trajectory of each own token, as the number of its line in all files together."""
        lines = torch.tensor(self.lines).repeat_interleave(self.batch.action_offsets.diff())
        return lines[self.own_T] + self.iteration * 2**32

    def place(self, token: int) -> str:
        """Return where the own token with this index is. All numbers are from 1."""
        t = int(torch.nonzero(self.own_T)[token])
        turn = int(torch.searchsorted(self.batch.turn_offsets, t, right=True)) - 1
        sequence = int(self.batch.turn_to_sequence_S[turn])
        first = int(torch.searchsorted(self.batch.turn_to_sequence_S, sequence))
        in_turn = t - int(self.batch.turn_offsets[turn])
        line, turn = self.lines[sequence], turn - first + 1
        iteration = f"iteration {self.iteration}, " if self.iteration else ""
        return f"{iteration}line {line}, turn {turn}, token {in_turn + 1}"


def _largest_logits(head: PolicyHead, hidden: Tensor) -> Tensor:
    assert head.weight is not None, "the last pipeline stage has the head"
    own = head.weight[: max(0, head.vocab_size - head.mesh.tensor_rank * len(head.weight))]
    largest = [(rows @ own.T).abs().amax(-1) for rows in hidden.split(head.chunk)]
    largest_T = torch.cat(largest).float() / head.temperature
    dist.all_reduce(largest_T, dist.ReduceOp.MAX, group=head.mesh.tensor_group)
    return largest_T


@dataclass(frozen=True)
class Scored:
    """The tokens of one version: by the engine, and by the trainer under it and under nudged weights.

    All tensors are of the same T tokens.
    """

    engine_T: Tensor
    sequence_T: Tensor  # their trajectories
    named_T: Tensor
    nudged_T: Tensor  # under one nudge
    limit_T: Tensor  # of the difference of a token
    most: float  # that the mean difference may be
    single: bool  # whether single tokens have limits

    @cached_property
    def excess_T(self) -> Tensor:
        """Difference / limit of each token; infinite for a NaN."""
        excess_T = (self.named_T - self.engine_T).abs() / self.limit_T.clamp(min=1e-30)
        return excess_T.nan_to_num(nan=torch.inf, posinf=torch.inf)

    @property
    def mean(self) -> float:
        """The mean difference, in nats."""
        return float((self.named_T - self.engine_T).abs().mean())

    @property
    def near(self) -> bool:
        """Whether the mean is as small as it must be. That of NaN is not."""
        return self.mean <= self.most

    @property
    def beyond(self) -> int:
        """The number of tokens beyond their limits."""
        return int((self.excess_T > 1).sum()) if self.single else 0

    def resembles(self, other_T: Tensor, of_T: Tensor | slice = slice(None)) -> Resemblance | None:
        """Return how much the engine's log-probs are those of another version, `other_T`. of_T: only these
        tokens."""
        every = (self.named_T, self.nudged_T, other_T, self.engine_T, self.sequence_T)
        return resemblance(*(x_T[of_T] for x_T in every))


def judges_single(learner: Learner, tolerance: float | None = None) -> bool:
    """Return whether single tokens have limits. In bfloat16, engine and trainer may choose different experts:
    there they have only a tolerance that the user has given."""
    rounded = process.dtype(learner.config) != torch.float32
    return tolerance is not None or not (learner.shape.experts and rounded)


def score(
    learner: Learner,
    pieces: Sequence[Piece],
    version: int,
    tolerance: float | None = None,
    shown: bool = False,
) -> Scored:
    """Score the tokens of the version whose weights are loaded. Collective.

    tolerance: the limit of all tokens, in nats, in place of one for each. shown: whether progress is.
    """
    eps = max(torch.finfo(process.dtype(piece.learner.config)).eps for piece in pieces)
    logits = list[Tensor]()
    for piece in progress(pieces, "scoring", shown):
        piece.under[version], largest_T = piece.logprobs_and_logits()
        logits.append(largest_T)
    named_T, logit_T = torch.cat([piece.under[version] for piece in pieces]), torch.cat(logits)
    engine_T = torch.cat([piece.engine_T for piece in pieces])
    sequence_T = torch.cat([piece.sequence_T for piece in pieces])
    moved_T, nudged_T = torch.zeros_like(named_T), named_T
    with nudging(learner.policy, eps) as nudge:
        for seed in progress(range(NUDGES), "rounding", shown):
            nudge(seed)
            nudged_T = torch.cat([piece.logprobs() for piece in pieces])
            moved_T = torch.maximum(moved_T, (nudged_T - named_T).abs())
        rounding_T = roundings(moved_T, named_T, logit_T, eps)
        beyond_T = ~((named_T - engine_T).abs() <= FACTOR * rounding_T)
        if tolerance is None and int(beyond_T.sum()) <= max(FEW, MANY * len(beyond_T)):
            rounding_T = rounding_T + _moved_more(nudge, pieces, version, beyond_T, moved_T) - moved_T
    limit_T, most = FACTOR * rounding_T, MEAN * float(rounding_T.mean())
    if tolerance is not None:
        limit_T, most = torch.full_like(named_T, tolerance), tolerance
    single = judges_single(learner, tolerance)
    return Scored(engine_T, sequence_T, named_T, nudged_T, limit_T, most, single)


def _moved_more(
    nudge: Callable[[int], None], pieces: Sequence[Piece], version: int, beyond_T: Tensor, moved_T: Tensor
) -> Tensor:
    """Return how far more nudges move the log-probs at most, in the pieces with tokens of `beyond_T`; moved_T
    elsewhere. Collective."""
    sizes = [len(piece.under[version]) for piece in pieces]
    suspects = [n for n, part in enumerate(beyond_T.split(sizes)) if part.any()]
    moved = list(moved_T.split(sizes))
    for seed in range(NUDGES, NUDGES + MORE if suspects else 0):
        nudge(seed)
        for n in suspects:
            change_T = (pieces[n].logprobs() - pieces[n].under[version]).abs()
            moved[n] = torch.maximum(moved[n], change_T)
    return torch.cat(moved)


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
