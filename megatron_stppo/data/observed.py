"""A batch in which observations count as action tokens: what a critic sees under algorithm.gae_observations.

The search baseline's GAE and value loss run over everything after the prompt; its policy loss does not.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatron_stppo.types import Batch


def with_observations(batch: Batch) -> Batch:
    """The same packed tokens and trajectories; its T are the batch's R, of which value_R and return_R are.

    A turn and the observation that answers it are one turn. Rewards and log-probs of observations are 0: no
    reward sits there, and no KL penalty.
    Example: the trajectory of types.Trajectory has action_index_T = [2, 3, .., 9] and turn_offsets [0, 7, 8].
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
    """int64 [T]: the action tokens among everything after the prompts."""
    return torch.searchsorted(_positions(batch), batch.action_index_T)


def _positions(batch: Batch) -> Tensor:
    """int64 [R] into P: tokens from the first action token of their trajectory on."""
    position_P = torch.arange(len(batch.tokens_P))
    lengths = batch.sequence_offsets.diff()
    starts = batch.sequence_offsets[1:].clone()  # nothing of a trajectory without action tokens
    acted = batch.action_offsets.diff() > 0
    starts[acted] = batch.action_index_T[batch.action_offsets[:-1][acted]]
    return position_P[position_P >= starts.repeat_interleave(lengths)]


def _rows_of(offsets: Tensor, acted_R: Tensor, total: int) -> Tensor:
    """Offsets into T as offsets into R: a slice begins where its first action token stands."""
    return torch.cat([acted_R, acted_R.new_tensor([total])])[offsets]
