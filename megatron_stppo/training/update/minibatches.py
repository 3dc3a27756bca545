"""Selection of the trajectories of each optimizer step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from megatron_stppo.base.types import Batch


def minibatches(
    trajectories: int, count: int, seed: int, iteration: int, epoch: int, first_N: Tensor | None = None
) -> list[list[int]]:
    """Return a random permutation of the episodes, cut into `count` parts, equal up to one episode.

    first_N: bool [N], the trajectories that begin an episode; None: all. The others of an episode follow it.
    The result depends only on the arguments, so resuming needs no saved state.

    Example: 8 trajectories and count 4 give four minibatches of 2. 9 trajectories of 8 episodes, as one with
    a branch adds one, give three of 2 and one of 3.
    """
    begins = range(trajectories) if first_N is None else first_N.nonzero().flatten().tolist()
    episodes = [list(range(*ends)) for ends in pairwise([*begins, trajectories])]
    assert len(episodes) >= count, (len(episodes), count)
    random.Random(f"{seed}/{iteration}/{epoch}").shuffle(episodes)  # a text seed is hashed equally everywhere
    cuts = [len(episodes) * part // count for part in range(count + 1)]
    return [[n for episode in episodes[start:end] for n in episode] for start, end in pairwise(cuts)]


def chosen_tokens(batch: Batch, chosen: Sequence[int]) -> Tensor:
    """Return the mask of the action tokens of the chosen trajectories, bool [T]."""
    chosen_N = torch.zeros(len(batch.live_N), dtype=torch.bool)
    chosen_N[torch.tensor(chosen)] = True
    return chosen_N.repeat_interleave(batch.action_offsets.diff())
