"""Selection of the trajectories of each optimizer step."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_stppo.types import Batch


def minibatches(trajectories: int, count: int, seed: int, iteration: int, epoch: int) -> list[list[int]]:
    """Return a random permutation of the trajectories, cut into `count` equal parts.

    The result depends only on the arguments, so resuming needs no saved state.

    Example: 8 trajectories and count 4 give four minibatches of 2.
    """
    assert trajectories % count == 0, (trajectories, count)
    order = list(range(trajectories))
    random.Random(f"{seed}/{iteration}/{epoch}").shuffle(order)  # a text seed is hashed equally everywhere
    size = trajectories // count
    return [order[start : start + size] for start in range(0, trajectories, size)]


def chosen_tokens(batch: Batch, chosen: Sequence[int]) -> Tensor:
    """Return the mask of the action tokens of the chosen trajectories, bool [T]."""
    chosen_N = torch.zeros(len(batch.live_N), dtype=torch.bool)
    chosen_N[torch.tensor(chosen)] = True
    return chosen_N.repeat_interleave(batch.action_offsets.diff())
