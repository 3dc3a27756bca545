from __future__ import annotations

import itertools

from megatron_stppo.training.update.minibatches import minibatches


def test_seed_iteration_and_epoch_each_change_the_minibatches() -> None:
    keys = list(itertools.product(range(3), repeat=3))
    orders = [minibatches(9, 3, *key) for key in keys]
    assert all(sorted(itertools.chain(*order)) == list(range(9)) for order in orders)
    assert len({str(order) for order in orders}) == len(keys)
    assert orders == [minibatches(9, 3, *key) for key in keys]


def test_minibatches_are_equal_up_to_one_trajectory() -> None:
    for trajectories, sizes in ((8, [2, 2, 2, 2]), (9, [2, 2, 2, 3])):
        assert [len(part) for part in minibatches(trajectories, 4, 0, 0, 0)] == sizes
