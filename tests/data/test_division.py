from __future__ import annotations

import itertools

import torch

from megatron_stppo.data.division import minibatches

EVERY = torch.ones(9, dtype=torch.bool)  # each trajectory is an episode


def test_seed_iteration_and_epoch_each_change_the_minibatches() -> None:
    keys = list(itertools.product(range(3), repeat=3))
    orders = [minibatches(EVERY[:9], 3, *key) for key in keys]
    assert all(sorted(itertools.chain(*order)) == list(range(9)) for order in orders)
    assert len({str(order) for order in orders}) == len(keys)
    assert orders == [minibatches(EVERY[:9], 3, *key) for key in keys]


def test_minibatches_are_equal_up_to_one_episode() -> None:
    for trajectories, sizes in ((8, [2, 2, 2, 2]), (9, [2, 2, 2, 3])):
        assert [len(part) for part in minibatches(EVERY[:trajectories], 4, 0, 0, 0)] == sizes


def test_the_histories_of_an_episode_stay_together_and_the_order_of_episodes_is_that_of_trajectories() -> (
    None
):
    """Episodes of 1, 3, 1 and 2 histories, in two minibatches of two episodes."""
    first_N = torch.tensor([True, True, False, False, True, True, False])
    episodes = [[0], [1, 2, 3], [4], [5, 6]]
    for iteration in range(9):
        order = minibatches(EVERY[:4], 2, 0, iteration, 0)
        assert minibatches(first_N, 2, 0, iteration, 0) == [
            [n for episode in part for n in episodes[episode]] for part in order
        ]
