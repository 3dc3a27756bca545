"""Advantages and returns of the action tokens of a batch, and the rewards that they are computed from."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_stppo.algorithm.baselines import BY_TURN, group_relative, turn_returns, whitened
from megatron_stppo.algorithm.gae import Lambda, later_steps, of_length, token_level, turn_level
from megatron_stppo.algorithm.own import OwnAdvantage
from megatron_stppo.algorithm.penalties import KLEstimator, kl, overlong
from megatron_stppo.algorithm.ratio import episode_offsets, segment_sum, spread
from megatron_stppo.base.types import Batch, BatchT, EstimatedBatch, ScoredBatch
from megatron_stppo.config import AlgorithmConfig
from megatron_stppo.data.validity import columns

# the columns of action tokens that are known for observations too
OF_ALL = {"value_T": "value_R", "return_T": "return_R"}


def estimate(
    batch: ScoredBatch,
    algorithm: AlgorithmConfig,
    group_N: Tensor,
    own: OwnAdvantage | None = None,
    usual: float = 0.0,
) -> EstimatedBatch:
    """Return the batch with its advantages and, for GAE, its returns.

    With algorithm.truncated=mask, truncated trajectories are not live any more. With gae_observations,
    return_R is filled too, and whitening includes the observation tokens.

    own: algorithm.advantage, if it names a function. usual: StepMemory.deviation, see `whitened`.
    group_N: int64 [N], equal for the trajectories of one task. Every rank has the columns of all action
    tokens, so no collective is needed.
    Raises ValueError if the batch lacks values or log-probs that the settings need.
    """
    if algorithm.truncated == "mask":
        batch = replace(batch, live_N=batch.live_N & ~batch.cut_N)
    shaped = _shaped(batch, algorithm)
    whole = with_observations(shaped) if algorithm.gae_observations else shaped
    advantage_T, return_T = _over_actions(whole, algorithm, group_N, own)
    deviation = 0.0
    if algorithm.advantage == "gae" and algorithm.whiten and _rewards_vary(shaped):
        advantage_T, deviation = whitened(advantage_T, whole.live_T, usual)
    advantage_T, return_R = advantage_T.float(), None
    if algorithm.gae_observations:
        assert return_T is not None, "only GAE includes observations"
        rows, return_R = action_rows(batch), return_T
        advantage_T, return_T = advantage_T[rows], return_T[rows]
    return EstimatedBatch.of(
        batch, advantage_T=advantage_T, return_T=return_T, return_R=return_R, deviation=deviation
    )


def _shaped(batch: BatchT, algorithm: AlgorithmConfig) -> BatchT:
    first, last = algorithm.overlong_from, algorithm.overlong_to
    if first is None or last is None:
        return batch
    return with_overlong_penalty(batch, first, last, algorithm.overlong_penalty)


def _over_actions(
    batch: ScoredBatch, algorithm: AlgorithmConfig, group_N: Tensor, own: OwnAdvantage | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the advantages and, for GAE, the returns, float32 [T]."""
    in_reward = algorithm.kl_coefficient if algorithm.kl_in == "reward" else 0.0
    if algorithm.advantage != "gae":
        # Only the environment's outcomes are normalised. If the KL penalty were normalised too, a group of
        # equal outcomes would get advantages of size 1 from the penalty's noise. The penalties of a token and
        # of the later tokens of its trajectory are subtracted afterwards, as in GAE with gamma = lam = 1.
        of_rewards_T = _relative(batch, algorithm, group_N, own)
        without = replace(batch, reward_T=torch.zeros_like(batch.reward_T))
        penalty_T = with_kl_penalty(without, in_reward, algorithm.kl_estimator)
        gamma = algorithm.gamma if algorithm.advantage == "kl" else 1.0
        to_come_T, _ = token_level(penalty_T, without.reward_T, batch.action_offsets, gamma, 1.0)
        advantage_T = of_rewards_T + to_come_T.float()
        return advantage_T.masked_fill(~batch.live_T, 0).float(), None
    reward_T = with_kl_penalty(batch, in_reward, algorithm.kl_estimator)
    advantage_T, return_T = _gae(batch, reward_T, algorithm)
    dead_T = ~batch.live_T
    return advantage_T.masked_fill(dead_T, 0), return_T.masked_fill(dead_T, 0).float()


def has_signal(
    batch: Batch, algorithm: AlgorithmConfig, group_N: Tensor, own: OwnAdvantage | None = None
) -> bool:
    """Return whether the rewards, without KL penalties, differ between live trajectories; True if they do not
    count.

    For GAE all trajectories of the batch are compared, for group advantages only those of the same group.
    Without such a difference, the actor's gradient contains only entropy bonus, KL penalty and the critic's
    noise. Adam is invariant to the gradient's size and would make full steps along it. With GAE and
    gamma < 1, equal nonzero rewards count as a signal too, because they are discounted by when they arrive.

    Example: rewards (0, 0) and (1, 1) of two groups are a signal for GAE, but not for advantage="group".
    """
    batch = _shaped(batch, algorithm)
    if algorithm.advantage == "gae":
        discounted = algorithm.gamma < 1 and bool(batch.reward_T[batch.live_T].any())
        return discounted or _rewards_vary(batch)
    if algorithm.advantage == "kl":
        return True
    return bool(_relative(batch, algorithm, group_N, own).any())


def _relative(batch: Batch, algorithm: AlgorithmConfig, group_N: Tensor, own: OwnAdvantage | None) -> Tensor:
    """Return the advantages that compare rewards within a group, float64 [T]; 0 for failed trajectories."""
    total, owner_S = len(batch.reward_T), batch.turn_to_sequence_S
    of_episode_N = _of_outcomes(batch, algorithm, group_N, own)
    if algorithm.advantage not in BY_TURN:
        return spread(of_episode_N, batch.action_offsets, total)
    same, with_episode = BY_TURN[algorithm.advantage]
    live_N, first_N = batch.live_N, batch.first_N
    cell_S, counted_S = same(owner_S, group_N, live_N & first_N, batch.state_S)
    return_S = turn_returns(batch.reward_T, batch.turn_offsets, batch.action_offsets, algorithm.gamma)
    turn_S = group_relative(return_S, cell_S, live_N[owner_S], True, counted_S)
    if with_episode:
        turn_S = of_episode_N[owner_S] + algorithm.turn_weight * turn_S
    else:  # the turns of further histories have no index in the episode
        turn_S = torch.where(first_N[owner_S], turn_S, of_episode_N[owner_S])
    return spread(turn_S, batch.turn_offsets, total)


def _of_outcomes(
    batch: Batch, algorithm: AlgorithmConfig, group_N: Tensor, own: OwnAdvantage | None
) -> Tensor:
    """Return the advantage of each trajectory, float64 [N]; 0 for failed ones."""
    outcome_N, live_N, first_N = outcomes(batch.reward_T, batch.action_offsets), batch.live_N, batch.first_N
    if algorithm.advantage == "kl":
        return torch.zeros_like(outcome_N)
    if own is None:
        return group_relative(outcome_N, group_N, live_N, algorithm.advantage != "group_mean", first_N)
    advantage_N = own(outcome_N, group_N, live_N & first_N)
    if advantage_N.shape != live_N.shape:
        raise ValueError(
            f"algorithm.advantage: returned {list(advantage_N.shape)} for {len(live_N)} trajectories"
        )
    return advantage_N.double().masked_fill(~live_N, 0)


def _gae(batch: ScoredBatch, reward_T: Tensor, algorithm: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    if batch.value_T is None:
        raise ValueError("advantage='gae' needs the critic's values; score them first, or choose 'group'")
    offsets, cut_N = batch.action_offsets, batch.cut_N
    histories = algorithm.gae_histories
    first_N = torch.ones_like(batch.first_N) if histories == "alone" else batch.first_N
    chained = histories == "chained"
    if chained:
        reward_T = _rewarded_once(reward_T, batch)
        offsets, cut_N = episode_offsets(offsets, first_N), cut_N[first_N]
    of_level = partial(turn_level, turn_offsets=batch.turn_offsets)
    level = partial(
        of_level if algorithm.gae_level == "turn" else token_level,
        reward_T.float(),
        batch.value_T,
        trajectory_offsets=offsets,
        gamma=algorithm.gamma,
        cut_N=cut_N if algorithm.truncated == "bootstrap" else None,
    )
    lam = _lambda(batch, algorithm, first_N)
    if not chained and isinstance(lam, Tensor):
        lam = lam[first_N.cumsum(0) - 1]
    advantage_T, return_T = level(lam=lam)
    if algorithm.lam_critic is not None:
        _, return_T = level(lam=algorithm.lam_critic)
    if histories == "discounted":
        later_N = later_steps(_steps(batch, algorithm), first_N).double()
        advantage_T = advantage_T * spread((algorithm.gamma * lam) ** later_N, offsets, len(advantage_T))
    return advantage_T.float(), return_T.float()


def _rewarded_once(reward_T: Tensor, batch: Batch) -> Tensor:
    """Return the rewards without the environment's at the end of each history that another of its episode
    follows: every history has the reward of the episode there."""
    goes_on_N = ~batch.first_N.roll(-1) & (batch.action_offsets.diff() > 0)  # an episode begins the batch
    last = batch.action_offsets[1:][goes_on_N] - 1
    return reward_T.index_add(0, last, -batch.reward_T[last])


def _lambda(batch: Batch, algorithm: AlgorithmConfig, first_N: Tensor) -> Lambda:
    """Return the lambda of the advantages: one, or one per episode, by the number of its steps of GAE."""
    if algorithm.lam_length is None:
        return algorithm.lam
    return of_length(episode_offsets(_steps(batch, algorithm), first_N), algorithm.lam_length)


def _steps(batch: Batch, algorithm: AlgorithmConfig) -> Tensor:
    """Return the offsets of the trajectories in steps of GAE, int64 [N+1]."""
    if algorithm.gae_level == "token":
        return batch.action_offsets
    starts = batch.turn_offsets[:-1][batch.turn_offsets.diff() > 0]
    return torch.searchsorted(starts, batch.action_offsets)


def _rewards_vary(batch: Batch) -> bool:
    """Return whether the environment's reward differs between live trajectories of the global batch.

    If it does not, whitening would scale the critic's noise up to advantages of size 1.
    """
    reward = outcomes(batch.reward_T, batch.action_offsets)[batch.live_N]
    count, total, squares = float(len(reward)), float(reward.sum()), float(reward.square().sum())
    if count == 0:
        return False
    # a smaller difference may be the rounding error of its two terms
    return bool(squares / count - (total / count) ** 2 > 1e-12 * squares / count)


def with_kl_penalty(batch: ScoredBatch, coefficient: float, estimator: KLEstimator = "k1") -> Tensor:
    """Return reward_T - coefficient * KL(old policy || reference) as estimated per token, float32 [T].

    Raises ValueError if the coefficient is not 0 and the batch lacks old or reference log-probs.
    Example: reward 1, old -1, reference -3, coefficient 0.1: 1 - 0.1 * 2 = 0.8.
    """
    if coefficient == 0:
        return batch.reward_T
    if batch.old_logprob_T is None or batch.reference_logprob_T is None:
        raise ValueError(
            f"kl_coefficient={coefficient} needs old and reference log-probs; score the batch first"
        )
    return batch.reward_T - coefficient * kl(estimator, batch.old_logprob_T, batch.reference_logprob_T)


def with_overlong_penalty(batch: BatchT, first: int, last: int, most: float) -> BatchT:
    """Return the batch whose rewards are reduced by `overlong` of the action tokens of an episode.

    The tokens of all histories of the episode count, without prompts and observations. Every history bears
    the penalty, at its last token, as it bears the reward.
    Example: first 2, last 4, most 1: an episode of 3 action tokens loses 0.5, one of 5 loses 1.
    """
    tokens_N = batch.action_offsets.diff()
    episode_N = batch.first_N.cumsum(0) - 1  # the histories of an episode follow its first
    length_N = torch.zeros_like(tokens_N).index_add(0, episode_N, tokens_N)[episode_N]
    acted_N, reward_T = tokens_N > 0, batch.reward_T.clone()
    reward_T[batch.action_offsets[1:][acted_N] - 1] -= overlong(length_N, first, last, most)[acted_N].float()
    return replace(batch, reward_T=reward_T)


def outcomes(reward_T: Tensor, action_offsets: Tensor) -> Tensor:
    """Return the sum of each trajectory's rewards, float64 [N]."""
    return segment_sum(reward_T.double(), action_offsets)


def with_observations(batch: BatchT) -> BatchT:
    """Return a batch of the same packed tokens and trajectories, whose axis T is the axis R of `batch`.

    It is for the critic with algorithm.gae_observations: in the search baseline, GAE and the value loss
    include everything after the prompt, but the policy loss does not.
    Its value_T and return_T are value_R and return_R. A turn and the observation that follows it become one
    turn. Other columns are 0 for observations, which have neither reward nor KL penalty.
    Example: for the trajectory in types.Trajectory, action_index_T = [2, 3, .., 9], turn_offsets = [0, 7, 8].
    """
    own_R, acted_R = _positions(batch), action_rows(batch)
    changed: dict[str, Any] = {
        name: value_T.new_zeros(len(own_R)).index_copy(0, acted_R, value_T)
        for name, value_T in columns(batch).items()
        if name.endswith("_T")
    }
    changed |= {name: getattr(batch, of_all) for name, of_all in OF_ALL.items() if hasattr(batch, name)}
    changed["action_index_T"] = own_R
    ends = torch.cat([acted_R, acted_R.new_tensor([len(own_R)])])  # a slice begins at its first action token
    changed |= {name: ends[getattr(batch, name)] for name in ("turn_offsets", "action_offsets")}
    return replace(batch, **changed)


def action_rows(batch: Batch) -> Tensor:
    """Return the indices of the action tokens in the axis R (everything after the prompts), int64 [T]."""
    return torch.searchsorted(_positions(batch), batch.action_index_T)


def _positions(batch: Batch) -> Tensor:
    """Return the positions, among the tokens of all trajectories, of those from the first action token of
    each trajectory on, int64 [R]."""
    position = torch.arange(batch.tokens)
    lengths = batch.sequence_offsets.diff()
    starts = batch.sequence_offsets[1:].clone()  # no tokens if a trajectory has no action tokens
    acted = batch.action_offsets.diff() > 0
    starts[acted] = batch.action_index_T[batch.action_offsets[:-1][acted]]
    return position[position >= starts.repeat_interleave(lengths)]
