"""Makes a batch in which observations count as action tokens, for the critic with algorithm.gae_observations.

In the search baseline, GAE and the value loss include everything after the prompt, but the policy loss does
not.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_stppo.base.types import Batch, BatchT
from megatron_stppo.data.validity import columns

# the columns of action tokens that are known for observations too
OF_ALL = {"value_T": "value_R", "return_T": "return_R"}


def with_observations(batch: BatchT) -> BatchT:
    """Return a batch of the same packed tokens and trajectories, whose axis T is the axis R of `batch`.

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
    for name in ("turn_offsets", "action_offsets"):
        changed[name] = _rows_of(getattr(batch, name), acted_R, len(own_R))
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


def _rows_of(offsets: Tensor, acted_R: Tensor, total: int) -> Tensor:
    """Convert offsets into T to offsets into R. A slice begins at its first action token."""
    return torch.cat([acted_R, acted_R.new_tensor([total])])[offsets]
