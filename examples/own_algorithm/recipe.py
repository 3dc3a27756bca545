"""A loss and advantages of one's own: CISPO, leave-one-out, and REINFORCE++ with a baseline."""

from __future__ import annotations

import torch
from torch import Tensor


def cispo(logprob_T: Tensor, old_logprob_T: Tensor, advantage_T: Tensor, offsets: Tensor | None) -> Tensor:
    """Return each token's log-prob times its advantage and its importance ratio, which is at most 1.28.

    The ratio is a constant, so a token whose ratio is limited still has a gradient (arXiv 2506.13585, Eq. 4).
    """
    ratio_T = (logprob_T - old_logprob_T).exp().clamp(max=1.28)
    return -ratio_T.detach() * advantage_T * logprob_T


def leave_one_out(outcome_N: Tensor, group_N: Tensor, counted_N: Tensor) -> Tensor:
    """Return each outcome less the mean of the other counted outcomes of its group (arXiv 2402.14740)."""
    same_NN = (group_N[:, None] == group_N) & counted_N
    same_NN &= ~torch.eye(len(group_N), dtype=torch.bool)
    others_N = same_NN.sum(1)
    mean_N = (same_NN * outcome_N).sum(1) / others_N.clamp(min=1)
    return (outcome_N - mean_N).masked_fill(others_N == 0, 0)


def over_batch(outcome_N: Tensor, group_N: Tensor, counted_N: Tensor) -> Tensor:
    """Return each outcome less the mean of its group, divided by the deviation of these over the whole batch.

    REINFORCE++ with a baseline (arXiv 2501.03262). 0 for a group of fewer than two.
    """
    same_NN = (group_N[:, None] == group_N) & counted_N
    count_N = same_NN.sum(1)
    centred_N = outcome_N - (same_NN * outcome_N).sum(1) / count_N.clamp(min=1)
    centred_N = centred_N.masked_fill(count_N < 2, 0)
    deviation = centred_N[counted_N].square().mean().add(1e-8).sqrt() if counted_N.any() else 1
    return centred_N / deviation
