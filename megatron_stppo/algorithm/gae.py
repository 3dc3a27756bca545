"""Generalised advantage estimation over action tokens.

Source: Schulman et al., arXiv 1506.02438. Inside one trajectory, over its action tokens in order,
    delta_t = r_t + gamma V_{t+1} - V_t,    A_t = delta_t + gamma lam A_{t+1},    V = A = 0 beyond the end.
The axis has no observation tokens: the last token of a turn is followed by the first token of the next turn,
so value, delta and the product of lambdas skip the observation between them.
"""

import torch
from torch import Tensor

from megatron_stppo.algorithm.ratio import episode_offsets, segment_sum, spread

Lambda = float | Tensor  # one, or one per trajectory, float64 [N]


def of_length(trajectory_offsets: Tensor, alpha: float) -> Tensor:
    """Return lambda = 1 - 1 / (alpha l) for each trajectory of l steps, at least 0, float64 [N].

    Source: VAPO, arXiv 2504.05118, equation 9. Example: 10 steps and alpha = 1.5 give 0.9333.
    """
    length_N = trajectory_offsets.diff().double()
    return (1 - 1 / (alpha * length_N)).clamp(min=0)


def token_level(
    reward_T: Tensor,
    value_T: Tensor,
    trajectory_offsets: Tensor,
    gamma: float,
    lam: Lambda,
    cut_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (advantage_T, return_T), float64, where return_T = advantage_T + value_T.

    cut_N: bool [N], trajectories that a limit has cut off. What would have followed counts with the value of
    their last step, because the value after it is not known; what follows an end counts 0.

    Example: rewards (0, 0, 1), values (0.5, 0.5, 0.8), gamma = lam = 1: advantages (0.5, 0.5, 0.2), all
    returns 1. Cut off, with rewards of 0: advantages (0.3, 0.3, 0), all returns 0.8.
    """
    reward_T, value_T = reward_T.double(), value_T.double()
    remaining_T = _remaining(trajectory_offsets, len(reward_T))
    next_value_T = torch.zeros_like(value_T)
    next_value_T[:-1] = value_T[1:].masked_fill(remaining_T[:-1] == 0, 0)
    if cut_N is not None:
        last = trajectory_offsets[1:][cut_N & (trajectory_offsets.diff() > 0)] - 1
        next_value_T[last] = value_T[last]
    if isinstance(lam, Tensor):
        lam = spread(lam, trajectory_offsets, len(reward_T))
    advantage_T = _discounted_sum(reward_T + gamma * next_value_T - value_T, remaining_T, gamma * lam)
    return advantage_T, advantage_T + value_T


def turn_level(
    reward_T: Tensor,
    value_T: Tensor,
    turn_offsets: Tensor,
    trajectory_offsets: Tensor,
    gamma: float,
    lam: Lambda,
    cut_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (advantage_T, return_T), float64, with turns as the steps of GAE.

    The value of a turn is the value at its first token; its reward is the sum over its tokens. gamma and lam
    are applied once per turn. All tokens of a turn get its advantage and its return. Turns without tokens are
    left out. cut_N: as of token_level, of the trajectories.
    """
    turn_offsets = turn_offsets[
        torch.cat([turn_offsets.diff() > 0, turn_offsets.new_ones(1, dtype=torch.bool)])
    ]
    start_S = turn_offsets[:-1]
    offsets_S = torch.searchsorted(start_S, trajectory_offsets)  # turns that start before each trajectory
    reward_S = segment_sum(reward_T.double(), turn_offsets)
    advantage_S, return_S = token_level(reward_S, value_T[start_S], offsets_S, gamma, lam, cut_N)
    total = len(reward_T)
    return spread(advantage_S, turn_offsets, total), spread(return_S, turn_offsets, total)


def later_steps(offsets: Tensor, first_N: Tensor) -> Tensor:
    """Return the number of steps in the later histories of its episode, for each history, int64 [N].

    Source: N_{>s} in CompactionRL, arXiv 2607.05378, equation 14.
    Example: histories of 2, 3 and 1 steps, of which the first two are of one episode: (3, 0, 0).
    """
    return episode_offsets(offsets, first_N)[1:][first_N.cumsum(0) - 1] - offsets[1:]


def _remaining(offsets: Tensor, total: int) -> Tensor:
    """Return how many tokens of the same trajectory follow each token, int64 [T]."""
    last_T = spread(offsets[1:].long() - 1, offsets, total)
    return last_T - torch.arange(total, device=offsets.device)


def _discounted_sum(delta_T: Tensor, remaining_T: Tensor, factor: Lambda) -> Tensor:
    """Return sum_k factor^k delta_{t+k}, up to the end of the trajectory, by doubling.

    After the pass with stride j every token holds the sum over the 2j tokens that start at it, so
    log2(longest) passes are enough. A token's result depends only on its own trajectory and has the same bits
    for every packing.
    """
    out_T, stride = delta_T.clone(), 1
    longest = int(remaining_T.max()) if len(remaining_T) else 0
    while stride <= longest:
        ahead_T = out_T[stride:].masked_fill(remaining_T[:-stride] < stride, 0)
        near = factor[:-stride] if isinstance(factor, Tensor) else factor
        out_T[:-stride] += near**stride * ahead_T
        stride *= 2
    return out_T
