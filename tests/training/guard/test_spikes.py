from __future__ import annotations

import math

from megatron_stppo.training.guard.spikes import Spikes

NAME = "actor/gradient_norm"


def watched(*past: float) -> Spikes:
    spikes = Spikes(window=8, deviations=10)
    for value in past:
        assert spikes.look({NAME: value}) == []
    return spikes


def test_a_value_ten_deviations_above_the_median_is_a_spike() -> None:
    """After 10, 12, 8, 14, 6: median 10, median absolute deviation 2, bound 10 + 10 * 1.4826 * 2 = 39.652."""
    (spike,) = watched(10, 12, 8, 14, 6).look({NAME: 39.7})
    assert str(spike) == "actor/gradient_norm=39.7 exceeds 39.65"
    assert watched(10, 12, 8, 14, 6).look({NAME: 39.6}) == []


def test_the_sign_of_the_objective_does_not_matter() -> None:
    spikes = Spikes(window=8, deviations=10)
    for value in (2.0, -2.0, 2.0, -2.0):
        spikes.look({"actor/objective": value})
    assert len(spikes.look({"actor/objective": -4.1})) == 1  # 2 + 10 * 0.1 * 2 = 4


def test_no_value_is_a_spike_before_half_a_window_is_recorded() -> None:
    assert watched(1, 1, 1).look({NAME: 1e9}) == []
    assert len(watched(1, 1, 1, 1).look({NAME: 1e9})) == 1


def test_the_first_rewards_are_no_spike() -> None:
    assert watched(0, 0, 0, 0, 0).look({NAME: 0.9}) == []


def test_one_spike_does_not_hide_the_next_and_a_lasting_change_becomes_the_new_normal() -> None:
    spikes = watched(2, 2, 2, 2, 2, 2)
    assert [len(spikes.look({NAME: 50})) for _ in range(6)] == [1, 1, 1, 1, 0, 0]


def test_values_that_are_missing_or_not_finite_are_skipped() -> None:
    spikes = watched(2, 2, 2, 2)
    assert spikes.look({NAME: math.nan}) == spikes.look({NAME: math.inf}) == spikes.look({}) == []
    assert len(spikes.look({NAME: 50})) == 1


def test_a_restored_state_gives_the_same_results() -> None:
    spikes, again = watched(2, 2, 2, 2), Spikes(window=8, deviations=10)
    again.restore(spikes.state())
    assert again.look({NAME: 50}) == spikes.look({NAME: 50}) != []
