"""Advantages relative to a group of trajectories, and whitening: what GAE does not compute."""

from __future__ import annotations

import torch
from torch import Tensor

EPSILON = 1e-8  # added to a variance; keeps the division finite


def group_relative(
    outcome_N: Tensor, group_N: Tensor, live_N: Tensor, normalised: bool, first_N: Tensor | None = None
) -> Tensor:
    """Return each trajectory's outcome minus the mean of its group's live episodes, float64 [N].

    With `normalised` it is divided by the group's population standard deviation. The result is 0 for failed
    trajectories, and for groups with a single live episode or with equal live outcomes.

    first_N: the first history of each episode; None: every trajectory is an episode. Mean and deviation are
    over episodes, so that one with several histories counts once.
    Example: two outcomes (0, 1) become (-1, 1) if normalised, else (-1/2, 1/2). If the second episode has two
    histories, the outcomes (0, 1, 1) become (-1, 1, 1) and (-1/2, 1/2, 1/2).
    """
    groups, of_N = torch.unique(group_N, return_inverse=True)
    counted_N = live_N if first_N is None else live_N & first_N
    live = counted_N.double()
    count = live.new_zeros(len(groups)).index_add(0, of_N, live).clamp(min=1)

    def group_mean(value_N: Tensor) -> Tensor:
        zeros = value_N.new_zeros(len(groups))
        return (zeros.index_add(0, of_N, value_N.masked_fill(~counted_N, 0)) / count)[of_N]

    centred_N = outcome_N.double() - group_mean(outcome_N.double())
    variance_N = group_mean(centred_N.square())
    flat_N = variance_N <= 1e-12 * (1 + group_mean(outcome_N.double().square()))  # equal up to rounding
    if normalised:
        centred_N = centred_N / (variance_N + EPSILON).sqrt()
    return centred_N.masked_fill(flat_N | ~live_N, 0)


def whitened(advantage_T: Tensor, live_T: Tensor) -> Tensor:
    """Return the advantages with mean 0 and variance 1 over the live action tokens; 0 for the others.

    advantage_T: the action tokens of the global batch.
    """
    live = advantage_T[live_T].double()
    count = max(len(live), 1)
    centred_T = advantage_T.double() - live.sum() / count
    variance = centred_T[live_T].square().sum() / count
    return (centred_T / (variance + EPSILON).sqrt()).masked_fill(~live_T, 0)
