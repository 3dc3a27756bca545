"""How far the policy moved from the old one within an iteration, and what of it was clipped.

Exact and the same under every layout: the log-probs of each step are put together once, after its backward
pass, as those of the scores are. No pass through the model is made for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_stppo.algorithm.ratio import segment_offsets, segment_ratio, segment_sum, spread
from megatron_stppo.algorithm.surrogate import clipped
from megatron_stppo.config import AlgorithmConfig
from megatron_stppo.types import Batch
from megatron_stppo.update.minibatches import chosen_tokens

QUANTILES = {"p1": 0.01, "p50": 0.5, "p99": 0.99, "max": 1.0}


class Ratios:
    """`add` every optimizer step of an iteration, then `row`.

    last_logprob_T: float32 [T], per trajectory of its last step; 0 before.

    Example: two trajectories, of turns 1, 2 and of turn 1, a token each; clipped are turn 2 of the one and
    turn 1 of the other: actor/clip_fraction_turn_1 = 0.5, _turn_2 = 1, _turn_last = 1.
    """

    def __init__(self, batch: Batch, algorithm: AlgorithmConfig) -> None:
        self._batch, self._algorithm = batch, algorithm
        self._offsets = segment_offsets(algorithm.segments, batch.turn_offsets, batch.action_offsets)
        self._turn_T, self._is_last_T = _turns(batch)
        self.last_logprob_T = torch.zeros(len(batch.action_index_T))
        self._ratios: list[Tensor] = []
        turns = int(self._turn_T.max()) + 1 if len(self._turn_T) else 0
        self._counts = torch.zeros(2, turns, dtype=torch.int64)  # clipped tokens, tokens
        self._last = torch.zeros(2, dtype=torch.int64)  # the same of last turns

    def add(self, logprob_T: Tensor, weight_T: Tensor, chosen: Sequence[int]) -> None:
        """logprob_T: float32 [T] of the step's policy, weight_T of its loss; chosen: its trajectories."""
        batch, a = self._batch, self._algorithm
        of_T = chosen_tokens(batch, chosen)
        self.last_logprob_T[of_T] = logprob_T[of_T]
        assert batch.old_logprob_T is not None and batch.advantage_T is not None
        ratio_S, _ = segment_ratio(logprob_T, batch.old_logprob_T, self._offsets, a.pooling)
        live_T = weight_T != 0
        self._ratios.append(ratio_S[segment_sum(live_T.double(), self._offsets) > 0])
        clipped_T = clipped(ratio_S, batch.advantage_T, weight_T, self._offsets, a.clip_low, a.clip_high)
        for kind, of_T in enumerate((clipped_T, live_T)):
            self._counts[kind] += torch.bincount(self._turn_T[of_T], minlength=self._counts.shape[1])
            self._last[kind] += (of_T & self._is_last_T).sum()

    def row(self) -> dict[str, float]:
        """Quantiles of the ratio over segments and steps, and clip fractions by turn, where there are any."""
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


def _turns(batch: Batch) -> tuple[Tensor, Tensor]:
    """Per action token the place of its turn in the trajectory, from 0, and whether it is the last one's."""
    owner_S, total = batch.turn_to_sequence_S, len(batch.action_index_T)
    first_N = torch.searchsorted(owner_S, torch.arange(len(batch.live_N)))  # turns are in their order
    place_S = torch.arange(len(owner_S)) - first_N[owner_S]
    is_last_S = torch.ones(len(owner_S), dtype=torch.bool)
    is_last_S[:-1] = owner_S[1:] != owner_S[:-1]
    return spread(place_S, batch.turn_offsets, total), spread(is_last_S, batch.turn_offsets, total)


def _quantile(value: Tensor, at: float) -> float:
    """The nearest rank: the least value that at least this share of them does not exceed. NaN if one is."""
    if bool(value.isnan().any()):
        return float("nan")
    rank = max(1, int(torch.ceil(torch.tensor(at * len(value), dtype=torch.float64))))
    return float(value.kthvalue(rank).values)
