"""Selection: which segments leave the surrogate, by how far they are from the old policy.

turn: turns that are far from the old policy and are pushed further away. Sources: M2PO, arXiv 2510.01161,
takes tokens out of a batch, those with the largest (log w)^2 first, until the mean of (log w)^2 over the
batch is at most 0.04. DeepSeek-V3.2, arXiv 2512.02556, takes out sequences with a negative advantage that are
far from the old policy. Difference: the unit is the turn, and every turn is compared with the bound on its
own, so that what happens to a turn does not depend on the others of its batch. Both signs are taken out, each
only where the surrogate pushes the turn further away.

ratio: segments whose ratio is not inside the clip bounds, whatever the sign of the advantage. Source: SAO,
arXiv 2607.07508, for tokens. Its gradient is r A grad log pi inside the bounds, which is that of r A.

probability: tokens whose probability has changed by more than the bound in the direction of the advantage.
Source: DPPO-Binary-TV, arXiv 2602.04879. Difference: the ratio is not truncated at 20.

With `ratio` and `probability` nothing is clipped. The KL and entropy terms of the loss keep all tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from megatron_stppo.algorithm.ratio import (
    Pooling,
    ratio_of,
    segment_count,
    segment_deltas,
    segment_sum,
    spread,
)
from megatron_stppo.algorithm.surrogate import compared


class SelectionFields(Protocol):
    """The fields of the configuration's section `algorithm` that a selection reads."""

    @property
    def select(self) -> str: ...
    @property
    def select_bound(self) -> float: ...
    @property
    def clip_low(self) -> float: ...
    @property
    def clip_high(self) -> float: ...
    @property
    def clip_length_power(self) -> float: ...
    @property
    def pooling(self) -> Pooling: ...


def leaving(
    a: SelectionFields,
    logprob_T: Tensor,
    old_logprob_T: Tensor,
    advantage_T: Tensor,
    weight_T: Tensor,
    segments: Tensor | None,
    turns: Tensor | None,
    add_up: Callable[[Tensor], object] = lambda sums: None,
) -> Tensor:
    """Return the tokens that leave the surrogate, bool [T].

    segments, turns: offsets of the segments of the ratio (None: every token is one) and of the turns, which
    only `turn` needs. add_up: adds the sums of ranks that hold parts of the same segments, in place.
    A segment with a NaN stays, so that the step is skipped. Tokens of weight 0 may hold NaN.
    """
    total, columns = len(logprob_T), (logprob_T.detach(), old_logprob_T, advantage_T, weight_T)
    if a.select == "turn":
        assert turns is not None
        sums = turn_sums(*columns, turns)
        add_up(sums)
        return spread(far_turns(sums, a.select_bound), turns, total)
    if a.select == "ratio":
        sums = torch.stack(segment_deltas(logprob_T.detach(), old_logprob_T, segments), dim=1)
        if segments is not None:  # a token is on one rank only
            add_up(sums)
        ratio_S, _ = ratio_of(sums[:, 0], sums[:, 1], a.pooling)
        compared_S = compared(ratio_S, sums[:, 1], a.clip_length_power, logprob_T.dtype)
        return spread((compared_S <= 1 - a.clip_low) | (compared_S >= 1 + a.clip_high), segments, total)
    if a.select == "probability":
        change_T = logprob_T.detach().double().exp() - old_logprob_T.double().exp()
        rises_T = advantage_T > 0
        return (rises_T & (change_T > a.select_bound)) | (~rises_T & (change_T < -a.select_bound))
    return torch.zeros(total, dtype=torch.bool, device=logprob_T.device)


def turn_sums(
    logprob_T: Tensor, old_logprob_T: Tensor, advantage_T: Tensor, weight_T: Tensor, offsets: Tensor
) -> Tensor:
    """Return number of tokens, sum of log w, sum of (log w)^2 and sum of c A of each turn, float64 [S, 4].

    log w = logprob - old_logprob per token. offsets: [S+1], the turns. Ranks that hold parts of the same
    turns add these up. Tokens of weight 0 do not count in the last sum, where their advantage may be NaN.
    """
    delta_T = logprob_T.detach().double() - old_logprob_T.double()
    pushed_T = (weight_T.double() * advantage_T.double()).masked_fill(weight_T == 0, 0)
    sums = [segment_sum(value_T, offsets) for value_T in (delta_T, delta_T.square(), pushed_T)]
    return torch.stack([segment_count(offsets, sums[0]), *sums], dim=1)


def far_turns(sums: Tensor, bound: float) -> Tensor:
    """Return the turns that leave the surrogate, bool [S].

    sums: turn_sums of the turns. A turn leaves if its mean of (log w)^2 is above the bound, and sum log w and
    sum c A have the same sign: the policy has raised (lowered) the turn's probability, and the surrogate
    would raise (lower) it more.

    Example: bound 0.04, one turn with log w = 0.1, 0.5, c = 1/2 and A = 1, 3: the mean of squares is 0.13 and
    sum c A = 2, so it leaves. With A = 1, -3 it stays.
    """
    count_S, delta_S, square_S, pushed_S = sums.unbind(1)
    return (square_S / count_S.clamp(min=1) > bound) & (delta_S * pushed_S > 0)
