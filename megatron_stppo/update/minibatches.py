"""Which trajectories each optimizer step sees."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_stppo.types import Batch


def minibatches(trajectories: int, count: int, seed: int, iteration: int, epoch: int) -> list[list[int]]:
    """A fresh permutation cut into `count` equal parts; a function of its arguments alone, so resume needs
    no state.

    Example: 8 trajectories and count 4 give four minibatches of 2.
    """
    assert trajectories % count == 0, (trajectories, count)
    order = list(range(trajectories))
    random.Random(f"{seed}/{iteration}/{epoch}").shuffle(order)  # text seeds are hashed the same everywhere
    size = trajectories // count
    return [order[start : start + size] for start in range(0, trajectories, size)]


def chosen_tokens(batch: Batch, chosen: Sequence[int]) -> Tensor:
    """bool [T]: action tokens of the chosen trajectories."""
    chosen_N = torch.zeros(len(batch.live_N), dtype=torch.bool)
    chosen_N[torch.tensor(chosen)] = True
    return chosen_N.repeat_interleave(batch.action_offsets.diff())
