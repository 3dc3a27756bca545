"""tools/study/contrasts.py: numbers that can be worked out by hand or looked up in tables."""

from __future__ import annotations

import itertools
import math

import pytest

from tools.study import contrasts, matrix
from tools.study.judge import T


def test_the_endpoint_is_the_mean_from_iteration_52_on_and_what_is_missing_is_0() -> None:
    assert contrasts.endpoint({i: 0.5 if i >= 52 else 0.9 for i in range(0, 101, 2)}) == 0.5
    assert contrasts.endpoint({i: 0.5 for i in range(0, 77, 2)}) == pytest.approx(0.5 * 13 / 25)
    assert contrasts.endpoint({i: 0.5 for i in range(0, 101, 2) if i != 60}) == 0.5, "a gap is left out"


def test_the_area_is_the_trapezoids_over_octaves() -> None:
    assert contrasts.area({1: 0.8, 2: 0.8, 4: 0.4}, 0.8) == pytest.approx(0.875)
    assert contrasts.area({1: 0.4, 16: 0.4}, 0.4) == 1


def test_the_t_distribution_has_the_quantiles_of_its_table() -> None:
    """The table has three decimals, so p differs by up to 5e-5 from 0.05 (at one degree of freedom)."""
    for freedom, quantile in enumerate(T, 1):
        assert contrasts.student(quantile, freedom) == pytest.approx(0.05, abs=1e-4)
    assert contrasts.student(1, 1) == pytest.approx(0.5)
    assert contrasts.student(0, 4) == 1


def test_p_values_of_hand_calculations() -> None:
    # mean 2, standard error 1 / sqrt(3): t = 3.464, and for two degrees of freedom p = 1 - t / sqrt(2 + t^2)
    assert contrasts.paired_p([1, 2, 3]) == pytest.approx(1 - math.sqrt(12 / 14))
    assert math.isnan(contrasts.paired_p([1]))
    # 3 standard errors inside the margin, one degree of freedom: (1 - 2/pi atan 3) / 2
    p = contrasts.equivalence([0.01, 0.03], 0.05)
    assert p == pytest.approx((1 - 2 / math.pi * math.atan(3)) / 2)
    assert contrasts.equivalence([0.07, 0.09], 0.05) == pytest.approx(1 - p), (
        "as far outside as it was inside"
    )


def test_the_test_of_equivalence_is_of_the_declared_arms_rate_and_seeds() -> None:
    grid = {
        "s_ppo": {6e-4: {5: 0.75, 6: 0.5, 16: 0.25, 17: 0.5}, 3e-4: {7: 0.5}},
        "open_loop": {6e-4: {5: 0.5, 7: 0.5, 16: 0.5, 17: 0.25}, 3e-4: {7: 0.25}},
    }
    assert contrasts.equivalence_differences(grid) == {5: 0.25, 16: -0.25}
    assert contrasts.equivalence_differences({"s_ppo": grid["s_ppo"]}) == {}


def test_holm_multiplies_by_the_number_of_declared_tests_that_are_left_and_never_decreases() -> None:
    assert contrasts.holm([0.04, 0.01, 0.03], 3) == pytest.approx([0.06, 0.03, 0.06])
    assert contrasts.holm([0.01], 4) == pytest.approx([0.04]), "three of four are not run yet"
    assert contrasts.holm([0.9, 0.8], 2) == [1, 1]


def test_a_contrast_uses_the_rates_and_seeds_that_both_arms_have() -> None:
    """Best cell: s_ppo at rate 1, mean 0.8. Areas over rates 1 and 2: s_ppo 0.75, 1 and 0.5, ppo 0.5 each."""
    grid = {
        "s_ppo": {1.0: {5: 0.8, 6: 0.8, 7: 0.8}, 2.0: {5: 0.4, 6: 0.8, 7: 0.0}, 4.0: {5: 0.1}},
        "ppo": {1.0: {5: 0.4, 6: 0.4, 7: 0.4, 8: 0.4}, 2.0: {5: 0.4, 6: 0.4, 7: 0.4}},
    }
    (found,) = contrasts.contrasts(grid)
    assert (found.left, found.right, found.rates, found.seeds) == ("s_ppo", "ppo", (1.0, 2.0), (5, 6, 7))
    assert found.differences == pytest.approx([0.25, 0.5, 0.0])
    assert not found.complete and math.isnan(found.p) and math.isnan(found.holm)


def test_contrasts_that_are_not_complete_do_not_lower_the_p_values_of_others() -> None:
    """Of the four declared contrasts s_ppo - ppo alone has its five rates and seeds."""
    rates, spread = [float(2**x) for x in range(5)], {5: 0.5, 6: 0.6, 7: 0.7, 8: 0.8, 9: 0.9}
    level = dict.fromkeys(spread, 0.5)
    grid = {"s_ppo": dict.fromkeys(rates, spread), "ppo": dict.fromkeys(rates, level)}
    grid["kl"] = {rate: {5: 0.25, 6: 0.35} for rate in rates}
    found = {c.right: c for c in contrasts.contrasts(grid)}
    assert not found["kl"].complete and math.isnan(found["kl"].holm)
    assert found["ppo"].differences == pytest.approx([0, 1 / 7, 2 / 7, 3 / 7, 4 / 7])
    # t = 0.2857 / (0.2259 / sqrt(5)) = 2.828 and 4 degrees of freedom: p = 0.0474
    assert found["ppo"].p == pytest.approx(0.0474, abs=1e-4)
    assert found["ppo"].holm == pytest.approx(4 * found["ppo"].p)


def test_only_declared_seeds_are_in_a_contrast() -> None:
    cell = dict.fromkeys((*contrasts.SEEDS, 10, 100), 0.5)
    grid = {arm: {float(2**x): cell for x in range(5)} for arm in ("s_ppo", "ppo")}
    (found,) = contrasts.contrasts(grid)
    assert found.seeds == (5, 6, 7, 8, 9) and found.complete
    grid["ppo"][1.0] = dict.fromkeys((5, 6, 7, 8, 100), 0.5)
    assert not contrasts.contrasts(grid)[0].complete


def test_the_bootstrap_of_equal_values_has_no_width_and_of_two_values_reaches_both() -> None:
    assert contrasts.bootstrap([0.5, 0.5, 0.5]) == (0.5, 0.5)
    assert contrasts.bootstrap([0.0, 1.0]) == (0.0, 1.0)


def test_the_rates_of_the_second_round_are_harsh_2_with_other_learning_rates() -> None:
    assert matrix.RATES["rate_1.5"] == 1.5e-4 and len(matrix.RATES) == contrasts.RATES
    assert matrix.SETTINGS["rate_6"] == matrix.SETTINGS["harsh_2"]
    ratios = [b / a for a, b in itertools.pairwise(matrix.RATES.values())]
    assert ratios == pytest.approx([2.0] * 4)
