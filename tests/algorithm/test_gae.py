from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stppo.algorithm.gae import later_steps, of_length, token_level, turn_level


def by_definition(reward, value, offsets, gamma, lam):
    """Return A_t = delta_t + gamma lam A_{t+1}, one token at a time."""
    advantage = torch.zeros(len(reward), dtype=torch.float64)
    for start, end in pairwise(offsets):
        running, next_value = 0.0, 0.0
        for t in reversed(range(start, end)):
            running = float(reward[t]) + gamma * next_value - float(value[t]) + gamma * lam * running
            next_value = float(value[t])
            advantage[t] = running
    return advantage


def test_gae_of_three_tokens_matches_a_hand_calculation():
    # delta = (0.5*0.5-1, 0.5*2-0.5, 1-2) = (-0.75, 0.5, -1), gamma lam = 1/4:
    # A = (-0.75 + 0.25/4, 0.5 - 0.25, -1) = (-0.6875, 0.25, -1); returns = A + V
    advantage, returns = token_level(
        torch.tensor([0.0, 0.0, 1.0]), torch.tensor([1.0, 0.5, 2.0]), torch.tensor([0, 3]), 0.5, 0.5
    )
    assert advantage.tolist() == pytest.approx([-0.6875, 0.25, -1.0])
    assert returns.tolist() == pytest.approx([0.3125, 0.75, 1.0])


def test_a_lambda_that_follows_the_length_is_1_minus_1_over_alpha_l_and_not_below_0():
    assert of_length(torch.tensor([0, 1, 11, 11]), 1.5).tolist()[:2] == pytest.approx([1 / 3, 14 / 15])
    assert of_length(torch.tensor([0, 10, 50]), 0.05).tolist() == pytest.approx([0, 0.5])


def test_later_steps_are_those_of_the_later_histories_of_the_same_episode():
    offsets, first_N = (
        torch.tensor([0, 2, 5, 6, 8, 9, 13]),
        torch.tensor([True, False, True, True, False, False]),
    )
    assert later_steps(offsets, first_N).tolist() == [3, 0, 0, 5, 4, 0]


def test_each_trajectory_has_its_own_lambda():
    draw = torch.Generator().manual_seed(0)
    reward, value = (torch.randn(40, generator=draw) for _ in range(2))
    offsets, lam = torch.tensor([0, 7, 7, 8, 40]), torch.tensor([0.9, 0.3, 0.0, 0.5]).double()
    advantage, returns = token_level(reward, value, offsets, 0.8, lam)
    for one, (start, end) in zip(lam.tolist(), pairwise(offsets.tolist()), strict=True):
        alone = by_definition(reward[start:end], value[start:end], [0, end - start], 0.8, one)
        assert torch.allclose(advantage[start:end], alone, atol=1e-12)
    assert torch.allclose(returns, advantage + value.double())


def test_turn_level_discounts_once_per_turn():
    # Turns of 2 and 1 tokens (and an empty one), rewards 1 and 4, first values 3 and 2, gamma 1/2, lambda 1:
    # A_2 = 4 - 2 = 2; A_1 = 1 + 2/2 - 3 + 2/2 = 0. Returns: 3 and 4. The value at token 1 is not read.
    advantage, returns = turn_level(
        torch.tensor([0.25, 0.75, 4.0]),
        torch.tensor([3.0, 99.0, 2.0]),
        torch.tensor([0, 2, 2, 3]),
        torch.tensor([0, 3]),
        0.5,
        1.0,
    )
    assert advantage.tolist() == pytest.approx([0, 0, 2])
    assert returns.tolist() == pytest.approx([3, 3, 4])


def test_turn_level_does_not_cross_trajectories():
    # One turn each: A = reward - first value.
    advantage, _ = turn_level(
        torch.tensor([0.0, 1.0, 2.0]),
        torch.tensor([0.5, 9.0, 0.5]),
        torch.tensor([0, 2, 3, 3]),
        torch.tensor([0, 2, 2, 3]),
        1.0,
        1.0,
    )
    assert advantage.tolist() == pytest.approx([0.5, 0.5, 1.5])


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(0, 40), max_size=6),
    st.integers(0, 2**31),
    st.sampled_from([0.0, 0.5, 0.97, 1.0]),
    st.sampled_from([0.0, 0.95, 1.0]),
)
def test_doubling_equals_the_recursion(lengths, seed, gamma, lam):
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    reward, value = (torch.randn(int(offsets[-1]), generator=generator) for _ in range(2))
    advantage, _ = token_level(reward, value, offsets, gamma, lam)
    expected = by_definition(reward, value, offsets.tolist(), gamma, lam)
    torch.testing.assert_close(advantage, expected, rtol=1e-10, atol=1e-10)


def test_the_bits_of_a_trajectory_do_not_depend_on_other_trajectories():
    generator = torch.Generator().manual_seed(0)
    reward, value = (torch.randn(300, generator=generator) for _ in range(2))
    together, _ = token_level(reward, value, torch.tensor([0, 100, 117, 300]), 0.9, 0.9)
    alone, _ = token_level(reward[100:117], value[100:117], torch.tensor([0, 17]), 0.9, 0.9)
    assert together[100:117].equal(alone)
