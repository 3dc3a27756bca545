"""Selection of turns: a turn that is far from the old policy and is pushed further away leaves the surrogate.

Sources: M2PO, arXiv 2510.01161, takes tokens out of a batch, those with the largest (log w)^2 first, until
the mean of (log w)^2 over the batch is at most 0.04. DeepSeek-V3.2, arXiv 2512.02556, takes out sequences
with a negative advantage that are far from the old policy.
Difference: the unit is the turn, and every turn is compared with the bound on its own, so that what happens
to a turn does not depend on the others of its batch. Both signs are taken out, each only where the surrogate
pushes the turn further away. The KL and entropy terms of the loss keep all turns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_stppo.algorithm.ratio import segment_count, segment_sum, spread


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


def leaving(sums: Tensor, offsets: Tensor, bound: float, total: int) -> Tensor:
    """Return the tokens of the turns that leave the surrogate, bool [total].

    sums: turn_sums of the turns. A turn leaves if its mean of (log w)^2 is above the bound, and sum log w and
    sum c A have the same sign: the policy has raised (lowered) the turn's probability, and the surrogate
    would raise (lower) it more. A turn with a NaN stays, so that the step is skipped.

    Example: bound 0.04, one turn with log w = 0.1, 0.5, c = 1/2 and A = 1, 3: the mean of squares is 0.13 and
    sum c A = 2, so it leaves. With A = 1, -3 it stays.
    """
    count_S, delta_S, square_S, pushed_S = sums.unbind(1)
    is_far_S = square_S / count_S.clamp(min=1) > bound
    return spread(is_far_S & (delta_S * pushed_S > 0), offsets, total)
