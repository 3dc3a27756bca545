from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from megatron_stppo.algorithm.rate import RATES, RateInput, StepMemory, capped_kl, may_rise, measured_kl

FIRST = RateInput(0, 1, 1.0, None, None, 0.01)


def factors_of_kl(kls: list[float], steps: int = 8, rise: str = "step") -> list[float]:
    """Return the factors of consecutive steps, `steps` in each iteration, whose capped_kl to the policy at
    the iteration's start is given. The target is 0.01."""
    found, last = [], 1.0
    for number, kl in enumerate(kls):
        measured = measured_kl(partial(float, kl), 0.0, number % steps, steps, False)
        rises = may_rise(rise, number % steps, steps, False)
        last = RATES["kl"](replace(FIRST, last=last, kl=measured, rises=rises))
        found.append(last)
    return found


def test_constant_is_1_and_the_profile_is_read_by_the_step_of_the_iteration() -> None:
    profiled = [replace(FIRST, index=n, profile=(1.0, 0.5, 0.25)) for n in range(3)]
    assert [RATES["constant"](given) for given in profiled] == [1, 1, 1]
    assert [RATES["open_loop"](given) for given in profiled] == [1, 0.5, 0.25]


def test_the_rate_falls_above_twice_the_target_and_rises_below_half_of_it() -> None:
    found = factors_of_kl([0.0, 0.021, 0.021, 0.02, 0.005, 0.0, 0.004])
    assert found == pytest.approx([1, 2 / 3, 4 / 9, 4 / 9, 4 / 9, 4 / 9, 2 / 3])
    assert factors_of_kl([0.0, 0.021, 0.004]) == pytest.approx([1, 2 / 3, 1])


def test_the_rate_stays_between_a_hundredth_and_the_configured_one() -> None:
    assert factors_of_kl([0.001, 0.001]) == [1, 1] and StepMemory().rate_scale == 1
    down = factors_of_kl([0.0] + [1.0] * 13, steps=99)
    assert down[11] == pytest.approx(1.5**-11) and down[12:] == [0.01, 0.01]
    assert factors_of_kl([0.0] + [1.0] * 13 + [0.001], steps=99)[-1] == pytest.approx(0.015)


def test_the_first_step_does_not_raise_what_the_next_one_lowers() -> None:
    found = factors_of_kl([0.0, 0.5] * 3, steps=2)
    assert found == pytest.approx([1, 2 / 3, 2 / 3, 4 / 9, 4 / 9, 8 / 27])


def test_a_quiet_iteration_raises_the_rate_once_if_so_configured() -> None:
    loud, quiet = [0.0, *[0.05] * 7], [0.0, *[0.001] * 7]
    assert factors_of_kl(loud + quiet)[-1] == pytest.approx(1)
    slow = factors_of_kl(loud + quiet + quiet, rise="iteration")
    assert slow[7:15] == pytest.approx([1.5**-7] * 8) and slow[15:] == pytest.approx(
        [1.5**-6] * 8 + [1.5**-5]
    )
    # where an iteration's KL is measured at its first step
    assert may_rise("iteration", 0, 1, False) and may_rise("iteration", 0, 4, True)
    assert not may_rise("iteration", 3, 4, True)


def test_one_token_does_not_decide_the_estimate() -> None:
    """65,000 tokens, one of them 270 times as probable as before: 264.8 nats of k3, which counts as 1."""
    log_ratio_T = torch.zeros(65_000)
    log_ratio_T[7] = 5.6
    old_T, live_T = torch.full((65_000,), -6.0), torch.ones(65_000, dtype=torch.bool)
    found = capped_kl(old_T + log_ratio_T, old_T, live_T)
    assert found == pytest.approx(1 / 65_000) and 2 * 0.002 < 264.8 / 65_000
    live_T[7] = False
    old_T[7] = math.nan
    assert capped_kl(old_T + log_ratio_T, old_T, live_T) == 0
    assert capped_kl(old_T, old_T, torch.zeros_like(live_T)) == 0
    small_T = torch.tensor([0.1, -0.1])
    expected = (math.exp(0.1) - 1.1 + math.exp(-0.1) - 0.9) / 2
    assert capped_kl(small_T, torch.zeros(2), live_T[:2]) == pytest.approx(expected)


@pytest.mark.parametrize(("steps", "from_engine"), [(1, False), (1, True), (4, True)])
def test_the_first_step_reads_what_the_update_before_has_done_where_no_other_is_measured(
    steps: int, from_engine: bool
) -> None:
    """A large KL to the engine, which no step has caused, is not read."""
    found = [measured_kl(lambda: 9.0, 0.003, index, steps, from_engine) for index in range(steps)]
    assert found == [0.003] + [None] * (steps - 1)
    assert measured_kl(lambda: 9.0, 0.0, 0, steps, from_engine) is None, "nothing was applied yet"


def test_rounding_at_the_start_of_an_iteration_is_no_measurement() -> None:
    found = [measured_kl(lambda: 1e-9, 0.5, index, 4, False) for index in range(3)]
    assert found == [None, 1e-9, 1e-9]


def test_a_constant_difference_of_engine_and_trainer_does_not_lower_the_rate() -> None:
    """KLs of 0.0045 and more to the engine, target 0.002; updates that move the policy by 0.0015."""
    last = 1.0
    for step in range(80):
        kl = measured_kl(partial(float, 0.0045 + 0.002 * (step % 5)), 0.0015, step % 4, 4, True)
        last = RATES["kl"](replace(FIRST, last=last, kl=kl, target=0.002))
    assert last == 1.0
