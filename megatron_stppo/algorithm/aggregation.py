"""The weight c_t of every action token in the loss; they sum to 1 over a minibatch on ALL ranks.

Never an average of averages: the denominators count the whole minibatch, however it is cut into microbatches
or ranks. A caller that holds only a part of the minibatch counts its part with `live_counts`, sums the counts
over ranks, and passes the sum.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megatron_stppo.algorithm.ratio import segment_sum, spread

Aggregation = Literal["token_mean", "sequence_mean_token_mean", "turn_mean"]


def live_counts(live_T: Tensor, turn_offsets: Tensor, action_offsets: Tensor) -> Tensor:
    """float64 [3]: live tokens, turns and trajectories with a live token. Add up over parts of a minibatch.

    Example: the batch of `token_weights` gives (4, 2, 1).
    """
    live = live_T.double()
    turns = (segment_sum(live, turn_offsets) > 0).sum()
    trajectories = (segment_sum(live, action_offsets) > 0).sum()
    return torch.stack([live.sum(), turns.double(), trajectories.double()])


def token_weights(
    kind: Aggregation,
    live_T: Tensor,
    turn_offsets: Tensor,
    action_offsets: Tensor,
    counts: Tensor | None = None,
) -> Tensor:
    """float32 [T], 0 on dead tokens; `counts` of the whole minibatch, None where it is all here.

    token_mean: 1 / tokens. turn_mean: 1 / (turns * live tokens of the turn). sequence_mean_token_mean: 1 /
    (trajectories * live tokens of the trajectory). Raises ValueError.
    Example: live turns of 3 and 1 tokens in one trajectory. token_mean: 1/4 each. turn_mean: 1/6, 1/6, 1/6
    and 1/2.
    """
    if counts is None:
        counts = live_counts(live_T, turn_offsets, action_offsets)
    tokens, turns, trajectories = counts.double().clamp(min=1).unbind()
    live = live_T.double()
    if kind == "token_mean":
        return (live / tokens).float()
    if kind == "turn_mean":
        return (live / _length(live, turn_offsets) / turns).float()
    if kind == "sequence_mean_token_mean":
        return (live / _length(live, action_offsets) / trajectories).float()
    raise ValueError(
        f"aggregation={kind!r} is not known; choose token_mean, sequence_mean_token_mean or turn_mean"
    )


def _length(live: Tensor, offsets: Tensor) -> Tensor:
    """[T]: live tokens of the token's segment, at least 1."""
    return spread(segment_sum(live, offsets).clamp(min=1), offsets, len(live))
