"""tools/study/judge.py on numbers that can be worked out by hand."""

from __future__ import annotations

import math

import pytest

from tools.study.judge import collapse_began, compare, mean_interval, median_time, time_to, wilson


def test_collapse_begins_where_the_evaluations_below_half_of_the_best_begin() -> None:
    every_second = [0, 2, 4, 6, 8]
    assert collapse_began(every_second, [0.8, 0.3, 0.5, 0.3, 0.2], patience=2) == 6
    assert collapse_began(every_second, [0.8, 0.4, 0.4, 0.4, 0.4], patience=2) is None, "0.4 is half"
    assert collapse_began(every_second, [0.8, 0.3, 0.8, 0.3, 0.8], patience=2) is None, "never in a row"


def test_collapse_is_measured_from_the_best_so_far_and_takes_ten_evaluations() -> None:
    rise, fall = [0.1, 0.3, 0.9], [0.44] * 10
    assert collapse_began(range(13), rise + fall) == 3
    assert collapse_began(range(12), rise + fall[1:]) is None, "nine are not enough"
    assert collapse_began(range(10), [0.1] * 10) is None, "what never learned has not collapsed"


def test_time_to_a_threshold_is_the_first_evaluation_at_it() -> None:
    assert time_to([0, 2, 4], [0.2, 0.6, 0.5], 0.6) == 2
    assert time_to([0, 2, 4], [0.2, 0.6, 0.5], 0.7) is None


def test_median_time_counts_never_as_infinite() -> None:
    assert median_time([4, None, 2]) == 4
    assert median_time([4, None]) == math.inf
    assert math.isnan(median_time([]))


def test_wilson_interval_matches_a_hand_calculation() -> None:
    half = 2 * math.sqrt(0.25 * 0.75 / 4 + 4 / 64) / 2
    assert wilson(1, 4, z=2) == pytest.approx((0.375 - half, 0.375 + half))
    assert wilson(0, 4, z=2) == pytest.approx((0, 0.5)), "z^2 / (n + z^2)"
    assert wilson(4, 4, z=2) == pytest.approx((0.5, 1))
    assert wilson(0, 0) == (0, 1)


def test_t_interval_of_a_mean_matches_a_hand_calculation() -> None:
    assert mean_interval([1, 2, 3]) == pytest.approx((2, 4.303 / math.sqrt(3)))
    middle, half = mean_interval([0.5])
    assert middle == 0.5 and math.isnan(half)


def test_algorithms_are_compared_on_the_seeds_that_both_have() -> None:
    assert compare({0: 3, 1: 5, 2: 1}, {0: 1, 1: 1, 7: 9}) == pytest.approx((3, 12.706, 2, 2))
