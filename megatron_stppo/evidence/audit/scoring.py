"""Action tokens scored by the trainer, and how far each may be from the engine (limits.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_stppo.base.types import Batch
from megatron_stppo.cluster.launch import process
from megatron_stppo.evidence.audit import limits
from megatron_stppo.model.learner import Learner
from megatron_stppo.model.pipeline import forward_only, logprobs


@dataclass
class Piece:
    """Trajectories of one iteration with tokens of one version, which are scored together."""

    iteration: int
    lines: list[int]  # of the iteration's file, from 1
    batch: Batch
    own_T: Tensor  # bool [T]: the tokens of the version
    learner: Learner  # with the settings of the iteration
    under: dict[int, Tensor] = field(default_factory=dict)  # {version: log-probs of own tokens under it}

    def logprobs(self) -> Tensor:
        """Return the log-probs of the own tokens under the weights that are loaded. Collective."""
        policy, every = self.learner.policy, [self.learner.packer.whole(self.batch)]
        logprob_T = logprobs(policy, self.learner.head(policy), self.batch, self.learner.packer, every)
        return logprob_T[self.own_T]

    def largest_logits(self) -> Tensor:
        """Return the largest absolute logits of the own tokens. Collective."""
        policy, every = self.learner.policy, [self.learner.packer.whole(self.batch)]
        answer = limits.largest_logits(self.learner.head(policy))
        return forward_only(policy, self.batch, self.learner.packer, every, answer)[self.own_T]

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
        return f"iteration {self.iteration}, line {line}, turn {turn}, token {in_turn + 1}"


@dataclass(frozen=True)
class Scored:
    """The tokens of one version, scored under it and under nudged weights. All are of the same T tokens."""

    named_T: Tensor
    nudged_T: Tensor  # under one nudge
    limit_T: Tensor  # of the difference of a token
    most: float  # that the mean difference may be


def score(learner: Learner, pieces: Sequence[Piece], version: int, tolerance: float | None) -> Scored:
    """Score the tokens of the version whose weights are loaded. Collective."""
    eps = max(torch.finfo(process.dtype(piece.learner.config)).eps for piece in pieces)
    for piece in pieces:
        piece.under[version] = piece.logprobs()
    named_T = torch.cat([piece.under[version] for piece in pieces])
    logit_T = torch.cat([piece.largest_logits() for piece in pieces])
    engine_T = torch.cat([piece.engine_T for piece in pieces])
    moved_T, nudged_T = torch.zeros_like(named_T), named_T
    with limits.nudging(learner.policy, eps) as nudge:
        for seed in range(limits.NUDGES):
            nudge(seed)
            nudged_T = torch.cat([piece.logprobs() for piece in pieces])
            moved_T = torch.maximum(moved_T, (nudged_T - named_T).abs())
        if tolerance is not None:
            return Scored(named_T, nudged_T, torch.full_like(named_T, tolerance), tolerance)
        rounding_T = limits.roundings(moved_T, named_T, logit_T, eps)
        beyond_T = ~((named_T - engine_T).abs() <= limits.FACTOR * rounding_T)
        if int(beyond_T.sum()) <= max(limits.FEW, limits.MANY * len(beyond_T)):
            rounding_T = rounding_T + _moved_more(nudge, pieces, version, beyond_T, moved_T) - moved_T
    return Scored(named_T, nudged_T, limits.FACTOR * rounding_T, limits.MEAN * float(rounding_T.mean()))


def _moved_more(
    nudge: Callable[[int], None], pieces: Sequence[Piece], version: int, beyond_T: Tensor, moved_T: Tensor
) -> Tensor:
    """Return how far more nudges move the log-probs at most, in the pieces with tokens of `beyond_T`; moved_T
    elsewhere. Collective."""
    sizes = [len(piece.under[version]) for piece in pieces]
    suspects = [n for n, part in enumerate(beyond_T.split(sizes)) if part.any()]
    moved = list(moved_T.split(sizes))
    for seed in range(limits.NUDGES, limits.NUDGES + limits.MORE if suspects else 0):
        nudge(seed)
        for n in suspects:
            change_T = (pieces[n].logprobs() - pieces[n].under[version]).abs()
            moved[n] = torch.maximum(moved[n], change_T)
    return torch.cat(moved)
