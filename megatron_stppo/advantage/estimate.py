"""Credit to action tokens: advantages and returns of a batch."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatron_stppo import ops
from megatron_stppo.advantage.rewards import outcomes, with_kl_penalty
from megatron_stppo.algorithm.ratio import spread
from megatron_stppo.config import AlgorithmConfig
from megatron_stppo.data.observed import action_rows, with_observations
from megatron_stppo.types import Batch

EPSILON = 1e-8  # beside a variance: keeps the division finite


def estimate(batch: Batch, algorithm: AlgorithmConfig, group_N: Tensor) -> Batch:
    """The batch with advantage_T and, for GAE, return_T filled, float32; both 0 on trajectories that failed.

    With gae_observations return_R is filled too, and whitening is over observations as well.

    group_N: int64 [N], equal for the trajectories of one task. The batch is the whole iteration's, on every
    rank, so nothing is reduced here.
    Raises ValueError where what the settings need (values, log-probs) is missing from the batch.
    """
    if algorithm.gae_observations:
        whole, rows = _over_actions(with_observations(batch), algorithm, group_N), action_rows(batch)
        assert whole.advantage_T is not None and whole.return_T is not None
        given = {"advantage_T": whole.advantage_T[rows], "return_T": whole.return_T[rows]}
        return replace(batch, **given, return_R=whole.return_T)
    return _over_actions(batch, algorithm, group_N)


def _over_actions(batch: Batch, algorithm: AlgorithmConfig, group_N: Tensor) -> Batch:
    in_reward = algorithm.kl_coefficient if algorithm.kl_in == "reward" else 0.0
    reward_T = with_kl_penalty(batch, in_reward, algorithm.kl_estimator)
    if algorithm.advantage != "gae":
        # The environment's outcomes alone are normalised: in a group where they are equal, normalising the KL
        # penalty would blow its noise up to advantages of size 1. A token's penalty and those still to come
        # in its trajectory are subtracted afterwards, as GAE has them at gamma = lam = 1.
        outcome_N = outcomes(batch.reward_T, batch.action_offsets)
        advantage_N = group_relative(outcome_N, group_N, batch.live_N, algorithm.advantage == "group")
        penalty_T = (reward_T - batch.reward_T).float()
        to_come_T, _ = ops.gae(penalty_T, torch.zeros_like(penalty_T), batch.action_offsets)
        advantage_T = spread(advantage_N, batch.action_offsets, len(reward_T)) + to_come_T
        return replace(batch, advantage_T=advantage_T.masked_fill(~batch.live_T, 0).float())
    advantage_T, return_T = _gae(batch, reward_T, algorithm)
    dead_T = ~batch.live_T
    advantage_T, return_T = advantage_T.masked_fill(dead_T, 0), return_T.masked_fill(dead_T, 0)
    if algorithm.whiten and _rewards_vary(batch):
        advantage_T = whitened(advantage_T, batch.live_T)
    return replace(batch, advantage_T=advantage_T.float(), return_T=return_T.float())


def has_signal(batch: Batch, algorithm: AlgorithmConfig, group_N: Tensor) -> bool:
    """Whether the environment's rewards tell live trajectories apart: those of the batch for GAE, those of a
    group for a group's advantage.

    Without that, entropy bonus, KL penalty and the critic's noise are all that is left of the actor's
    gradient, and Adam, which is invariant to its size, makes full steps of them. At gamma below 1 GAE tells
    equal rewards apart by when they come.
    Example: rewards (0, 0) and (1, 1) of two groups are a signal for GAE, and none for advantage="group".
    """
    if algorithm.advantage == "gae":
        discounted = algorithm.gamma < 1 and bool(batch.reward_T[batch.live_T].any())
        return discounted or _rewards_vary(batch)
    outcome_N = outcomes(batch.reward_T, batch.action_offsets)
    return bool(group_relative(outcome_N, group_N, batch.live_N, normalised=False).any())


def group_relative(outcome_N: Tensor, group_N: Tensor, live_N: Tensor, normalised: bool) -> Tensor:
    """float64 [N]: outcome - mean over the live trajectories of the group, divided by their deviation where
    `normalised`; 0 for failed ones.

    A group whose live outcomes are all equal, or that has one, teaches nothing: 0. The standard deviation is
    the population's, so that two outcomes (0, 1) become (-1, 1); without it (-1/2, 1/2).
    """
    groups, of_N = torch.unique(group_N, return_inverse=True)
    live = live_N.double()
    count = live.new_zeros(len(groups)).index_add(0, of_N, live).clamp(min=1)

    def group_mean(value_N: Tensor) -> Tensor:
        zeros = value_N.new_zeros(len(groups))
        return (zeros.index_add(0, of_N, value_N.masked_fill(~live_N, 0)) / count)[of_N]

    centred_N = outcome_N.double() - group_mean(outcome_N.double())
    variance_N = group_mean(centred_N.square())
    flat_N = variance_N <= 1e-12 * (1 + group_mean(outcome_N.double().square()))  # equal but for rounding
    if normalised:
        centred_N = centred_N / (variance_N + EPSILON).sqrt()
    return centred_N.masked_fill(flat_N | ~live_N, 0)


def whitened(advantage_T: Tensor, live_T: Tensor) -> Tensor:
    """Mean 0 and variance 1 over the live action tokens of the global batch; 0 on the others."""
    live = advantage_T[live_T].double()
    count = max(len(live), 1)
    centred_T = advantage_T.double() - live.sum() / count
    variance = centred_T[live_T].square().sum() / count
    return (centred_T / (variance + EPSILON).sqrt()).masked_fill(~live_T, 0)


def _gae(batch: Batch, reward_T: Tensor, algorithm: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    if batch.value_T is None:
        raise ValueError("advantage='gae' needs the critic's values; score them first, or choose 'group'")
    return ops.gae(
        reward_T.float(),
        batch.value_T,
        batch.action_offsets,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        turn_offsets=batch.turn_offsets if algorithm.gae_level == "turn" else None,
    )


def _rewards_vary(batch: Batch) -> bool:
    """Whether live trajectories of the global batch differ in the environment's reward.

    Without that, whitening would blow the critic's noise up to advantages of size 1.
    """
    reward = outcomes(batch.reward_T, batch.action_offsets)[batch.live_N]
    count, total, squares = float(len(reward)), float(reward.sum()), float(reward.square().sum())
    if count == 0:
        return False
    # what is below is the rounding of the two terms it is the difference of
    return bool(squares / count - (total / count) ** 2 > 1e-12 * squares / count)
