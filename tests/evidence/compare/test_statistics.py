"""Numbers that can be worked out by hand or looked up in tables."""

from __future__ import annotations

import math

import pytest

from megatron_stppo.evidence.compare.contrasts import holm, mean_interval, paired_p, quantile, student

TABLE = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 10: 2.228, 30: 2.042}  # t, 0.975 quantile


def test_the_t_distribution_has_the_quantiles_of_its_table() -> None:
    for freedom, t in TABLE.items():
        assert quantile(freedom) == pytest.approx(t, abs=5e-4)
        assert student(t, freedom) == pytest.approx(0.05, abs=1e-4)
    assert student(1, 1) == pytest.approx(0.5)
    assert student(0, 4) == 1


def test_the_interval_of_1_2_3_is_2_and_its_quantile_over_root_3() -> None:
    middle, half = mean_interval([1, 2, 3])
    assert (middle, half) == (2, pytest.approx(4.3027 / math.sqrt(3), abs=1e-4))
    assert mean_interval([7])[0] == 7 and math.isnan(mean_interval([7])[1])


def test_p_values_of_hand_calculations() -> None:
    # mean 2, standard error 1 / sqrt(3): t = 3.464, and for two degrees of freedom p = 1 - t / sqrt(2 + t^2)
    assert paired_p([1, 2, 3]) == pytest.approx(1 - math.sqrt(12 / 14))
    assert (paired_p([0.5, 0.5]), paired_p([0.0, 0.0])) == (0, 1)
    assert math.isnan(paired_p([1]))


def test_holm_multiplies_by_the_number_of_declared_tests_that_are_left_and_never_decreases() -> None:
    assert holm([0.04, 0.01, 0.03], 3) == pytest.approx([0.06, 0.03, 0.06])
    assert holm([0.01], 4) == pytest.approx([0.04]), "three of four are not run yet"
    assert holm([0.9, 0.8], 2) == [1, 1]
