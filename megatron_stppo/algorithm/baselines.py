"""Advantages relative to a group of trajectories, and whitening: what GAE does not compute."""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_stppo.algorithm.gae import token_level
from megatron_stppo.algorithm.ratio import segment_sum

EPSILON = 1e-8  # added to a variance; keeps the division finite
LEAST = 0.5  # of the usual deviation, that whitening divides by


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


def turn_returns(reward_T: Tensor, turn_offsets: Tensor, action_offsets: Tensor, gamma: float) -> Tensor:
    """Return the reward of each turn plus those of the later turns of its trajectory, float64 [S].

    gamma: discount per turn. Example: turns with the rewards (1, 0, 2) and gamma = 1/2: (1.5, 1, 2).
    """
    reward_S = segment_sum(reward_T.double(), turn_offsets)
    turns = torch.searchsorted(turn_offsets[:-1], action_offsets)  # offsets of the trajectories into S
    _, return_S = token_level(reward_S, torch.zeros_like(reward_S), turns, gamma, 1.0)
    return return_S


def same_index(owner_S: Tensor, group_N: Tensor, counted_N: Tensor, state_S: Tensor) -> tuple[Tensor, Tensor]:
    """Return cells, int64 [S], of turns with the same index in the trajectories of a group, and which turns
    the mean of their cell counts, bool [S].

    owner_S: the trajectory of each turn, in ascending order. counted_N: the first histories of live episodes;
    their turns count. Turns with an index that fewer than two of these have are in the cell of the last index
    that two have, and count there: without them, their distance from the others could be any number of
    deviations. In a group with fewer than two of these, every turn has a cell of its own: discounting alone
    would be compared.
    Example: episodes of 1, 2 and 4 turns: turns 2 to 4 of the third and turn 2 of the second are compared.
    """
    index_S = torch.arange(len(owner_S)) - torch.searchsorted(owner_S, owner_S)
    group_S = _cells(group_N[owner_S])
    place_S = _cells(group_S, index_S)
    episodes_S = torch.zeros_like(place_S).index_add(0, place_S, counted_N[owner_S].long())[place_S]
    shared_S = index_S.masked_fill(episodes_S < 2, 0)
    last_S = torch.zeros_like(group_S).scatter_reduce(0, group_S, shared_S, "amax")[group_S]
    most_S = torch.zeros_like(group_S).scatter_reduce(0, group_S, episodes_S, "amax")[group_S]
    alone_S = torch.arange(len(owner_S)).masked_fill(most_S >= 2, 0)
    return _cells(group_S, index_S.minimum(last_S), alone_S), counted_N[owner_S]


def same_state(owner_S: Tensor, group_N: Tensor, counted_N: Tensor, state_S: Tensor) -> tuple[Tensor, Tensor]:
    """Return cells, int64 [S], of the turns of a group that begin in the same state, and that all count.

    The anchor states of GiGPO, arXiv 2505.10978, equation 6. Turns of one episode are compared, too. A turn
    without a state (0) has a cell of its own.
    """
    alone_S = torch.arange(len(state_S)).masked_fill(state_S != 0, 0)
    cell_S = _cells(_cells(group_N[owner_S]), state_S, alone_S)
    return cell_S, torch.ones_like(cell_S, dtype=torch.bool)


def _cells(*column_S: Tensor) -> Tensor:
    """Return equal numbers for turns with equal entries in all columns, int64 [S]."""
    cell_S: Tensor = torch.unique(torch.stack(column_S), dim=1, return_inverse=True)[1]
    return cell_S


# advantages of turns by name: which turns are compared, and whether the advantage of the episode is added
BY_TURN: dict[str, tuple[Callable[..., tuple[Tensor, Tensor]], bool]] = {
    "group_turn": (same_index, False),
    "gigpo": (same_state, True),
}


def whitened(advantage_T: Tensor, live_T: Tensor, usual: float = 0.0) -> tuple[Tensor, float]:
    """Return the advantages with mean 0 and variance 1 over the live action tokens, and their deviation.

    advantage_T: the action tokens of the global batch; those that are not live become 0. usual: the mean of
    the deviations of earlier batches. The divisor is at least LEAST of it, so that the variance may end below
    1: otherwise the one failure among many episodes would make steps that are many times the usual ones.

    Example: one failure in 512 has the advantage -22.6; after batches half of whose rewards are 0, -4.
    """
    live = advantage_T[live_T].double()
    count = max(len(live), 1)
    centred_T = advantage_T.double() - live.sum() / count
    deviation = (centred_T[live_T].square().sum() / count + EPSILON).sqrt()
    divisor = deviation.clamp(min=LEAST * usual)
    return (centred_T / divisor).masked_fill(~live_T, 0), float(deviation)
