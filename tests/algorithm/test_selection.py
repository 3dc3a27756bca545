from __future__ import annotations

import math

import torch

from megatron_stppo.algorithm.selection import leaving, turn_sums


def left(log_ratios: list[float], advantages: list[float], weights: list[float], *ends: int) -> list[bool]:
    """Return which tokens leave, with bound 0.04. `ends`: where the turns end."""
    offsets, old_T = torch.tensor([0, *ends]), torch.full((len(log_ratios),), -1.0)
    columns = (torch.tensor(log_ratios) + old_T, old_T, torch.tensor(advantages), torch.tensor(weights))
    return leaving(turn_sums(*columns, offsets), offsets, 0.04, len(old_T)).tolist()


def test_a_far_turn_leaves_only_if_the_advantage_pushes_it_further_away() -> None:
    """Turns of two tokens with log-ratios of +-0.3: the mean of squares is 0.09."""
    ratios = [0.3, 0.3, 0.3, 0.3, -0.3, -0.3, -0.3, -0.3]
    advantages = [1.0, 1.0, -1.0, -1.0, 1.0, 1.0, -1.0, -1.0]
    up, down = [True, True, False, False], [False, False, True, True]
    assert left(ratios, advantages, [0.125] * 8, 2, 4, 6, 8) == up + down


def test_a_turn_is_far_by_the_mean_of_squares_in_which_signs_do_not_cancel() -> None:
    # Means of squares: (0.16 + 0.09) / 2 = 0.125 and (0.01 + 0.0625) / 2 = 0.036, with mean 0.05 and 0.175.
    assert left([0.4, -0.3, 0.1, 0.25], [1.0] * 4, [0.25] * 4, 2, 4) == [True, True, False, False]


def test_the_push_is_the_sum_of_weighted_advantages() -> None:
    # A = 3, -2, -2: the sum is -1, but with weights 2, 1, 1 it is +2.
    assert left([0.3] * 3, [3.0, -2.0, -2.0], [1.0, 1.0, 1.0], 3) == [False] * 3
    assert left([0.3] * 3, [3.0, -2.0, -2.0], [2.0, 1.0, 1.0], 3) == [True] * 3


def test_parts_of_a_turn_add_up_to_the_turn() -> None:
    """The first of two ranks holds the first token of a turn, the second the others. A turn is empty."""
    first = turn_sums(
        *(torch.tensor([0.5]), torch.zeros(1), torch.ones(1), torch.ones(1)), torch.tensor([0, 1, 1])
    )
    second = turn_sums(
        *(torch.tensor([0.1, 0.0]), torch.zeros(2), torch.ones(2), torch.ones(2)), torch.tensor([0, 2, 2])
    )
    both = first + second
    torch.testing.assert_close(both, torch.tensor([[3, 0.6, 0.26, 3], [0, 0, 0, 0]], dtype=torch.float64))
    assert leaving(both, torch.tensor([0, 2, 2]), 0.04, 2).tolist() == [True, True]
    assert leaving(second, torch.tensor([0, 2, 2]), 0.04, 2).tolist() == [False, False]


def test_a_turn_with_a_nan_stays_and_one_without_weight_may_hold_nan() -> None:
    assert left([math.nan, 0.5, 0.5], [1.0, 1.0, math.nan], [1.0, 1.0, 0.0], 1, 3) == [False, True, True]


def test_a_turn_that_nothing_pushes_and_one_on_the_bound_stay() -> None:
    assert left([0.3], [0.0], [1.0], 1) == [False]
    assert left([0.3, 0.3], [-0.5, math.nan], [1.0, 0.0], 2) == [False, False]
    sums = torch.tensor([[1, 0.5, 0.25, 1]], dtype=torch.float64)
    assert [leaving(sums, torch.tensor([0, 1]), bound, 1).item() for bound in (0.25, 0.24)] == [False, True]


def test_the_selection_has_no_gradient() -> None:
    one = torch.ones(1)
    assert not turn_sums(one.clone().requires_grad_(), one, one, one, torch.tensor([0, 1])).requires_grad
