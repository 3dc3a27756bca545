"""The weight c_t of every action token in the loss, computed from the whole minibatch of ALL ranks.

The loss is never an average of averages. The denominators count the whole minibatch, which every rank holds,
and a micro-batch uses the weights of its tokens in the minibatch. docs/algorithms.md gives the source of each
kind.
"""

from typing import Literal

from torch import Tensor

from megatron_stppo.algorithm.ratio import episode_offsets, segment_sum, spread

Aggregation = Literal[
    "token_mean",
    "turn_mean",
    "episode_mean",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "sequence_mean_token_sum_norm",
]


def token_weights(
    kind: Aggregation,
    live_T: Tensor,
    turn_offsets: Tensor,
    action_offsets: Tensor,
    length: int | None = None,
    first_N: Tensor | None = None,
) -> Tensor:
    """Return the weights of the action tokens of a whole minibatch, float32 [T]; 0 for dead tokens.

    A turn or a trajectory counts if at least one of its tokens is live. The kinds are:
    token_mean: 1 / live tokens.
    turn_mean: 1 / (turns * live tokens of the turn).
    episode_mean: 1 / (episodes * live tokens of the episode).
    sequence_mean_token_mean: 1 / (trajectories * live tokens of the trajectory).
    sequence_mean_token_sum: 1 / trajectories.
    sequence_mean_token_sum_norm: 1 / (trajectories * length), for a constant `length`.
    first_N: bool [N], the trajectories that begin an episode; None: all. An agent's episode may have left
    several, one after another; all other kinds count each trajectory on its own.
    The weights of the first four sum to 1. Raises ValueError for an unknown kind or a missing `length`.

    Example: live turns of 3 and 1 tokens in one trajectory. token_mean: 1/4 each. turn_mean: 1/6, 1/6, 1/6
    and 1/2. sequence_mean_token_sum: 1 each; with _norm and length 8: 1/8 each.
    """
    live = live_T.double()
    tokens = live.sum().clamp(min=1)
    turns, trajectories = (
        (segment_sum(live, offsets) > 0).sum().clamp(min=1) for offsets in (turn_offsets, action_offsets)
    )
    if kind == "token_mean":
        return (live / tokens).float()
    if kind == "turn_mean":
        return (live / _length(live, turn_offsets) / turns).float()
    if kind == "episode_mean":
        offsets = episode_offsets(action_offsets, first_N)
        episodes = (segment_sum(live, offsets) > 0).sum().clamp(min=1)
        return (live / _length(live, offsets) / episodes).float()
    if kind == "sequence_mean_token_mean":
        return (live / _length(live, action_offsets) / trajectories).float()
    if kind == "sequence_mean_token_sum":
        return (live / trajectories).float()
    if kind == "sequence_mean_token_sum_norm":
        if length is None:
            raise ValueError(f"aggregation={kind!r} divides by a constant length; give one")
        return (live / trajectories / length).float()
    raise ValueError(
        f"aggregation={kind!r} is not known; choose token_mean, turn_mean, episode_mean, "
        "sequence_mean_token_mean, sequence_mean_token_sum or sequence_mean_token_sum_norm"
    )


def _length(live: Tensor, offsets: Tensor) -> Tensor:
    """Return the number of live tokens in each token's segment, at least 1: [T]."""
    return spread(segment_sum(live, offsets).clamp(min=1), offsets, len(live))
