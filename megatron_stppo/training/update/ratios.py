"""Statistics of the ratio to the old policy within an iteration, and of the clipped tokens.

They are exact and do not depend on the parallel layout: the log-probs of each step are gathered once from all
ranks after the backward pass, as those of scoring are. No extra pass through the model is needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_stppo.algorithm.ratio import (
    ratio_of,
    segment_deltas,
    segment_offsets,
    segment_ratio,
    segment_sum,
    spread,
)
from megatron_stppo.algorithm.selection import leaving
from megatron_stppo.algorithm.surrogate import clipped, compared
from megatron_stppo.base.types import Batch, EstimatedBatch, UpdatedBatch
from megatron_stppo.config import AlgorithmConfig
from megatron_stppo.data.division import chosen_tokens

QUANTILES = {"p1": 0.01, "p50": 0.5, "p99": 0.99, "max": 1.0}


@dataclass(frozen=True)
class StepRatios:
    """Log-probs, ratios to the old policy and clipped tokens of one optimizer step. Equal on every rank.

    The axes are those of the whole batch; values are defined for the step's trajectories only.

    Example: a step on the second of two trajectories, which has one turn of two tokens with ratios 1 and 4,
    A = 1 and bound 1.2: chosen_T = [False, True, True], ratio_S[1] = 2, clipped_T[1:] = [True, True].
    """

    chosen_T: Tensor  # bool, the action tokens of the step's trajectories
    live_T: Tensor  # bool, those of them that carry loss
    logprob_T: Tensor  # float32, under the policy before the step
    ratio_S: Tensor  # float32, of the algorithm's segments
    clipped_T: Tensor  # bool
    left_T: Tensor  # bool, tokens that algorithm.select takes out of the surrogate

    @classmethod
    def of(
        cls,
        batch: EstimatedBatch,
        logprob_T: Tensor,
        weight_T: Tensor,
        chosen: Sequence[int],
        a: AlgorithmConfig,
    ) -> StepRatios:
        """Compute the ratios and the clipped tokens of a step.

        logprob_T: float32 [T], also the old policy's if the batch has none. weight_T: [T], the weights of the
        step's loss. chosen: its trajectories.
        """
        old_T = logprob_T if batch.old_logprob_T is None else batch.old_logprob_T
        offsets = segment_offsets(a.segments, batch.turn_offsets, batch.action_offsets)
        delta_S, count_S = segment_deltas(logprob_T, old_T, offsets)
        exact_S, _ = ratio_of(delta_S, count_S, a.pooling)
        compared_S = compared(exact_S, count_S, a.clip_length_power, logprob_T.dtype)
        left_T = leaving(a, logprob_T, old_T, batch.advantage_T, offsets)
        clipped_T = clipped(compared_S, batch.advantage_T, weight_T, offsets, a.clip_low, a.clip_high)
        if not a.clips:
            clipped_T = torch.zeros_like(clipped_T)
        ratio_S, chosen_T = exact_S.to(logprob_T.dtype), chosen_tokens(batch, chosen)
        return cls(chosen_T, weight_T != 0, logprob_T, ratio_S, clipped_T, left_T)

    @property
    def selected(self) -> float:
        """Return the share of the tokens that carry loss that stay in the surrogate; 1 without any."""
        tokens = int(self.live_T.sum())
        return int((self.live_T & ~self.left_T).sum()) / tokens if tokens else 1.0


class Ratios:
    """Accumulator of ratio statistics: call `add` for every optimizer step of an iteration, then `row`.

    first: those of the first step, whose policy is that at the iteration's start; None before it.
    last: the ratios of the last step on each trajectory; None before the first step.

    Example: one trajectory has turns 1 and 2, another only turn 1, with one token per turn. If turn 2 of the
    first and turn 1 of the second are clipped, actor/clip_fraction_turn_1 = 0.5, _turn_2 = 1, _turn_last = 1.
    """

    def __init__(self, batch: Batch, algorithm: AlgorithmConfig) -> None:
        self._offsets = segment_offsets(algorithm.segments, batch.turn_offsets, batch.action_offsets)
        self._turn_T, self._is_last_T = _turns(batch)
        self.first: StepRatios | None = None
        self.last: StepRatios | None = None
        self._ratios: list[Tensor] = []
        turns = int(self._turn_T.max()) + 1 if len(self._turn_T) else 0
        self._counts = torch.zeros(2, turns, dtype=torch.int64)  # clipped tokens, tokens
        self._last = torch.zeros(2, dtype=torch.int64)  # the same for last turns

    def add(self, step: StepRatios) -> None:
        """Add one optimizer step."""
        self.first = step if self.first is None else self.first
        self.last = step if self.last is None else self._updated(self.last, step)
        self._ratios.append(step.ratio_S[self._holds(step.live_T)])
        for kind, of_T in enumerate((step.clipped_T, step.live_T)):
            self._counts[kind] += torch.bincount(self._turn_T[of_T], minlength=self._counts.shape[1])
            self._last[kind] += (of_T & self._is_last_T).sum()

    def row(self) -> dict[str, float]:
        """Return quantiles of the ratio over segments and steps, and the clip fraction of each turn.

        Quantiles without segments and fractions without tokens are left out.
        """
        ratio = torch.cat(self._ratios) if self._ratios else torch.zeros(0)
        row = {f"actor/ratio_{name}": _quantile(ratio, at) for name, at in QUANTILES.items() if len(ratio)}
        names = [*range(1, self._counts.shape[1] + 1), "last"]
        counts = torch.cat([self._counts, self._last[:, None]], dim=1)
        fractions = {
            f"actor/clip_fraction_turn_{name}": out / of
            for name, out, of in zip(names, *counts.tolist(), strict=True)
            if of > 0
        }
        return row | fractions

    def _updated(self, before: StepRatios, step: StepRatios) -> StepRatios:
        """Return `before` with the values of `step` for the trajectories of `step`."""
        return StepRatios(
            before.chosen_T | step.chosen_T,
            torch.where(step.chosen_T, step.live_T, before.live_T),
            torch.where(step.chosen_T, step.logprob_T, before.logprob_T),
            torch.where(self._holds(step.chosen_T), step.ratio_S, before.ratio_S),
            torch.where(step.chosen_T, step.clipped_T, before.clipped_T),
            torch.where(step.chosen_T, step.left_T, before.left_T),
        )

    def _holds(self, mask_T: Tensor) -> Tensor:
        """Return whether a segment holds a token of the mask, bool [S]."""
        return segment_sum(mask_T.double(), self._offsets) > 0


def _turns(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the index (from 0) of each action token's turn in its trajectory, and whether it is the last."""
    owner_S, total = batch.turn_to_sequence_S, len(batch.action_index_T)
    first_N = torch.searchsorted(owner_S, torch.arange(len(batch.live_N)))  # turns are ordered by trajectory
    place_S = torch.arange(len(owner_S)) - first_N[owner_S]
    is_last_S = torch.ones(len(owner_S), dtype=torch.bool)
    is_last_S[:-1] = owner_S[1:] != owner_S[:-1]
    return spread(place_S, batch.turn_offsets, total), spread(is_last_S, batch.turn_offsets, total)


def _quantile(value: Tensor, at: float) -> float:
    """Return the quantile by nearest rank: the least x such that at least a share `at` of the values is <= x.

    at: above 0. Returns NaN if any value is NaN.
    """
    if bool(value.isnan().any()):
        return float("nan")
    rank = int(torch.ceil(torch.tensor(at * len(value), dtype=torch.float64)))
    return float(value.kthvalue(rank).values)


def turns(batch: UpdatedBatch, last: StepRatios | None, a: AlgorithmConfig) -> Iterator[list[dict[str, Any]]]:
    """Yield, for each trajectory, a list with one record per turn. Yield nothing if `last` is None.

    last: the ratios of the last step on each trajectory.
    Fields of a record: advantage and value are means over the turn's tokens. ratio is the importance ratio of
    the turn to the old policy, pooled by algorithm.pooling; it is of the turn even if the algorithm clips
    other segments. clipped is the number of clipped tokens. mismatch is the geometric mean of old policy /
    engine. Fields other than tokens are None if not finite, or if the trajectory carries no loss.

    Example: a turn of two tokens with log-probs 0.2 above the old ones and advantage 1 gives {"tokens": 2,
    "advantage": 1.0, "ratio": 1.2214, "clipped": 2.0, ...}.
    """
    if last is None:
        return
    old_T, advantage_T, offsets = batch.old_logprob_T, batch.advantage_T, batch.turn_offsets
    ratio_S, count_S = last.ratio_S, offsets.diff()
    if a.segments != "turn":
        ratio_S, _ = segment_ratio(last.logprob_T, old_T, offsets, a.pooling)
    columns = {
        "advantage": segment_sum(advantage_T.double(), offsets) / count_S,
        "ratio": ratio_S,
        "clipped": segment_sum(last.clipped_T.double(), offsets),
        "mismatch": segment_ratio(old_T, batch.rollout_logprob_T, offsets)[0],
    }
    if batch.value_T is not None:
        columns["value"] = segment_sum(batch.value_T.double(), offsets) / count_S
    lists = {name: column.tolist() for name, column in columns.items()}
    records: list[list[dict[str, Any]]] = [[] for _ in batch.live_N]
    live, tokens = batch.live_N.tolist(), count_S.tolist()
    for s, n in enumerate(batch.turn_to_sequence_S.tolist()):
        of_turn = {name: _number(column[s]) if live[n] else None for name, column in lists.items()}
        records[n].append({"tokens": tokens[s]} | of_turn)
    yield from records


def _number(value: float) -> float | None:
    """Return the value rounded to six significant digits, or None if it is not finite (JSON has no NaN)."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
