"""Selection of the trajectories of each optimizer step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from megatron_stppo.base.types import Batch


def minibatches(trajectories: int, count: int, seed: int, iteration: int, epoch: int) -> list[list[int]]:
    """Return a random permutation of the trajectories, cut into `count` parts, equal up to one trajectory.

    The result depends only on the arguments, so resuming needs no saved state.

    Example: 8 trajectories and count 4 give four minibatches of 2; 9 trajectories, as an agent's episode with
    a branch adds one, give three of 2 and one of 3.
    """
    assert trajectories >= count, (trajectories, count)
    order = list(range(trajectories))
    random.Random(f"{seed}/{iteration}/{epoch}").shuffle(order)  # a text seed is hashed equally everywhere
    cuts = [trajectories * part // count for part in range(count + 1)]
    return [order[start:end] for start, end in pairwise(cuts)]


def chosen_tokens(batch: Batch, chosen: Sequence[int]) -> Tensor:
    """Return the mask of the action tokens of the chosen trajectories, bool [T]."""
    chosen_N = torch.zeros(len(batch.live_N), dtype=torch.bool)
    chosen_N[torch.tensor(chosen)] = True
    return chosen_N.repeat_interleave(batch.action_offsets.diff())
