"""Which trajectories each optimizer step sees."""

from __future__ import annotations

import random


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
