"""Makes a batch in which observations count as action tokens, for the critic with algorithm.gae_observations.

In the search baseline, GAE and the value loss include everything after the prompt, but the policy loss does
not.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatron_stppo.base.types import Batch


def with_observations(batch: Batch) -> Batch:
    """Return a batch of the same packed tokens and trajectories, whose axis T is the axis R of `batch`.

    Its value_T and return_T are value_R and return_R. A turn and the observation that follows it become one
    turn. Rewards, log-probs and versions of observations are 0, so observations have neither reward nor KL
    penalty.
    Example: for the trajectory in types.Trajectory, action_index_T = [2, 3, .., 9], turn_offsets = [0, 7, 8].
    """
    own_R = _positions(batch)
    acted_R = action_rows(batch)

    def spread(value_T: Tensor) -> Tensor:
        return value_T.new_zeros(len(own_R)).index_copy(0, acted_R, value_T)

    old_T, reference_T = batch.old_logprob_T, batch.reference_logprob_T
    return replace(
        batch,
        action_index_T=own_R,
        turn_offsets=_rows_of(batch.turn_offsets, acted_R, len(own_R)),
        action_offsets=_rows_of(batch.action_offsets, acted_R, len(own_R)),
        rollout_logprob_T=spread(batch.rollout_logprob_T),
        version_T=spread(batch.version_T),
        reward_T=spread(batch.reward_T),
        old_logprob_T=None if old_T is None else spread(old_T),
        reference_logprob_T=None if reference_T is None else spread(reference_T),
        value_T=batch.value_R,
        return_T=batch.return_R,
        advantage_T=None,
        value_R=None,
        return_R=None,
    )


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


def _rows_of(offsets: Tensor, acted_R: Tensor, total: int) -> Tensor:
    """Convert offsets into T to offsets into R. A slice begins at its first action token."""
    return torch.cat([acted_R, acted_R.new_tensor([total])])[offsets]
