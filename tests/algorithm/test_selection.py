from __future__ import annotations

import math

import torch

from megatron_stppo.algorithm.selection import far_turns, leaving, turn_sums
from megatron_stppo.config import AlgorithmConfig


def left(log_ratios: list[float], advantages: list[float], weights: list[float], *ends: int) -> list[bool]:
    """Return which tokens leave, with bound 0.04. `ends`: where the turns end."""
    offsets, old_T = torch.tensor([0, *ends]), torch.full((len(log_ratios),), -1.0)
    columns = (torch.tensor(log_ratios) + old_T, old_T, torch.tensor(advantages), torch.tensor(weights))
    return leaving(AlgorithmConfig(preset="select_turn"), *columns, None, offsets).tolist()


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
    assert far_turns(both, 0.04).tolist() == [True, False]
    assert far_turns(second, 0.04).tolist() == [False, False]


def test_a_turn_with_a_nan_stays_and_one_without_weight_may_hold_nan() -> None:
    assert left([math.nan, 0.5, 0.5], [1.0, 1.0, math.nan], [1.0, 1.0, 0.0], 1, 3) == [False, True, True]


def test_a_turn_that_nothing_pushes_and_one_on_the_bound_stay() -> None:
    assert left([0.3], [0.0], [1.0], 1) == [False]
    assert left([0.3, 0.3], [-0.5, math.nan], [1.0, 0.0], 2) == [False, False]
    sums = torch.tensor([[1, 0.5, 0.25, 1]], dtype=torch.float64)
    assert [far_turns(sums, bound).item() for bound in (0.25, 0.24)] == [False, True]


def test_the_selection_has_no_gradient() -> None:
    one = torch.ones(1)
    assert not turn_sums(one.clone().requires_grad_(), one, one, one, torch.tensor([0, 1])).requires_grad


def leaves(
    preset: str, ratios: list[float], advantages: list[float], *ends: int, **settings: float
) -> list[bool]:
    """Return which tokens leave. Their old probability is 1/8. `ends`: where the turns end."""
    a = AlgorithmConfig.model_validate({"preset": preset, **settings})
    old_T = torch.full((len(ratios),), -math.log(8.0), dtype=torch.float64)
    new_T = old_T + torch.tensor(ratios, dtype=torch.float64).log()
    turns = torch.tensor([0, *ends])
    segments = turns if a.segments == "turn" else None
    columns = (new_T, old_T, torch.tensor(advantages), torch.ones(len(ratios)))
    return leaving(a, *columns, segments, turns).tolist()


def test_sao_masks_a_token_outside_the_bounds_whatever_its_advantage() -> None:
    """Bounds 0.2 and 4. A ratio on a bound is outside."""
    for sign in (1.0, -1.0):
        found = leaves("sao", [0.19, 0.21, 1.0, 3.9, 4.1], [sign] * 5, 5)
        assert found == [True, False, False, False, True]
    assert (
        leaves("sao", [1.0], [1.0], 1, clip_high=0.0)
        == leaves("sao", [1.0], [1.0], 1, clip_low=0.0)
        == [True]
    )
    assert leaves("sao", [math.nan], [1.0], 1) == [False], "such a step is skipped"


def test_the_turn_form_of_sao_masks_turns_by_bounds_that_follow_their_length() -> None:
    """Turns of 2 and 4 tokens with a ratio of 2, sqrt(4 * 1): bounds 1 + 3/2 and 1 + 3/4. Then 0.7: 1 - 0.8/2
    and 1 - 0.8/4."""
    assert leaves("sao_turn", [4.0, 1.0, 2.0, 2.0, 2.0, 2.0], [1.0] * 6, 2, 6) == [False] * 2 + [True] * 4
    assert leaves("sao_turn", [0.49, 1.0, *[0.7] * 4], [1.0] * 6, 2, 6) == [False] * 2 + [True] * 4
    plain = leaves("sao_turn", [4.0, 1.0, 2.0, 2.0, 2.0, 2.0], [1.0] * 6, 2, 6, clip_length_power=0)
    assert plain == [False] * 6


def test_dppo_masks_a_token_by_the_change_of_its_probability_in_the_direction_of_its_advantage() -> None:
    """Old probability 1/8, bound 0.15: it may rise to 0.275, or fall by all it has."""
    assert leaves("dppo", [2.19, 2.21, 2.21, 0.01], [1.0, 1.0, -1.0, -1.0], 4) == [False, True, False, False]
    assert leaves("dppo", [0.5, 0.1, 0.1], [-1.0, -1.0, 1.0], 3, select_bound=0.1) == [False, True, False]
    assert leaves("dppo", [0.1], [0.0], 1, select_bound=0.1) == [True], "an advantage of 0 counts as negative"


def test_all_tokens_stay_by_default() -> None:
    assert leaves("st_ppo", [9.0, 0.1], [1.0, -1.0], 2) == [False, False]
