"""Edge cases of gae, and bitwise reproducibility."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stppo import ops
from tests.ops.draws import fallback, normal, offsets_of, same_bits, unaligned

pytestmark = pytest.mark.usefixtures("device")
# A GPU processes a trajectory in tiles of 1,024 tokens.
LENGTHS = [5, 0, 1, 1023, 1024, 1025, 0, 5000, 3]


def draw(total):
    return normal(total, seed=1), normal(total, seed=2)


def turns_of(lengths):
    """Return turns of 7 tokens and a shorter last one. No turn crosses the end of a trajectory."""
    cut = [[7] * (length // 7) + [length % 7] for length in lengths]
    return offsets_of(*(turn for trajectory in cut for turn in trajectory))


def by_hand(reward, value, lengths, gamma, lam):
    out, end = [], 0
    for length in lengths:
        advantage, following, mine = 0.0, 0.0, []
        for t in range(end + length - 1, end - 1, -1):
            advantage = reward[t] + gamma * following - value[t] + gamma * lam * advantage
            following = value[t]
            mine.append(advantage)
        out += mine[::-1]
        end += length
    return torch.tensor(out, dtype=torch.float64)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (1.0, 0.0), (0.0, 0.0)])
def test_trajectories_of_any_length_equal_a_loop(gamma, lam):
    reward, value = draw(sum(LENGTHS))
    expected = by_hand(reward.tolist(), value.tolist(), LENGTHS, gamma, lam)
    advantage, returns = ops.gae(reward, value, offsets_of(*LENGTHS), gamma=gamma, lam=lam)
    torch.testing.assert_close(advantage.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(returns.double(), expected + value.double(), rtol=1e-5, atol=1e-5)


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.one_of(st.integers(0, 60), st.just(1300)), max_size=5),
    by_turn=st.booleans(),
    gamma=st.sampled_from([1.0, 0.99, 0.5]),
    lam=st.sampled_from([1.0, 0.9, 0.0]),
)
def test_advantages_equal_the_fallbacks(lengths, by_turn, gamma, lam):
    given = (*draw(sum(lengths)), offsets_of(*lengths))
    settings = {"turn_offsets": turns_of(lengths) if by_turn else None, "gamma": gamma, "lam": lam}
    mine = ops.gae(*given, **settings)
    with fallback():
        expected = ops.gae(*given, **settings)
    torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("by_turn", [False, True])
def test_empty_inputs_and_trajectories_without_tokens_are_allowed(by_turn):
    for lengths in ([], [0], [0, 0, 0]):
        turns = turns_of(lengths) if by_turn else None
        out = ops.gae(torch.zeros(0), torch.zeros(0), offsets_of(*lengths), turn_offsets=turns)
        assert [len(x) for x in out] == [0, 0]


@pytest.mark.parametrize("by_turn", [False, True])
def test_the_bits_of_a_trajectory_do_not_depend_on_its_neighbours(by_turn):
    lengths = [9, 1500, 4]
    reward, value = draw(sum(lengths))

    def evaluate(first, last):
        start, stop = sum(lengths[:first]), sum(lengths[:last])
        mine = lengths[first:last]
        turns = turns_of(mine) if by_turn else None
        given = (reward[start:stop], value[start:stop], offsets_of(*mine))
        return torch.stack(ops.gae(*given, gamma=0.99, lam=0.95, turn_offsets=turns))

    together = evaluate(0, 3)
    assert evaluate(1, 2).equal(together[:, 9:1509]) and evaluate(1, 3).equal(together[:, 9:])
    assert all(evaluate(0, 3).equal(together) for _ in range(99))


@pytest.mark.parametrize("by_turn", [False, True])
def test_threads_and_addresses_change_no_bit(by_turn):
    lengths = [300] * 40
    reward, value = draw(sum(lengths))
    turns, before, results = turns_of(lengths) if by_turn else None, torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            given = (unaligned(x, threads - 1) for x in (reward, value))
            results.append(ops.gae(*given, offsets_of(*lengths), lam=0.9, turn_offsets=turns))
    finally:
        torch.set_num_threads(before)
    assert same_bits(results[0], results[1]) and same_bits(results[0], results[2])


def test_a_nan_reaches_back_to_its_trajectorys_start_and_no_further():
    reward, value = draw(sum(LENGTHS))
    place = sum(LENGTHS[:7]) + 4000  # in the trajectory of 5,000 tokens
    reward[place] = math.nan
    advantage, _ = ops.gae(reward, value, offsets_of(*LENGTHS), lam=0.9)
    start = sum(LENGTHS[:7])
    assert advantage[start : place + 1].isnan().all()
    assert advantage[:start].isfinite().all() and advantage[place + 1 :].isfinite().all()


BAD = [[0, 70, 30, 100], [0, 60, 50, 100], [1, 100], [0, 99], [0, 101], [0, -5, 100], [0, 2**40, 100], [0]]


@pytest.mark.parametrize("wrong", BAD)
@pytest.mark.parametrize("name", ["trajectory_offsets", "turn_offsets"])
def test_offsets_out_of_order_are_an_error_or_nan(name, wrong, raises):
    given = {"trajectory_offsets": torch.tensor([0, 100]), name: torch.tensor(wrong)}
    if raises:
        with pytest.raises(ValueError, match=name):
            ops.gae(*draw(100), **given)
    else:
        assert all(x.isnan().all() for x in ops.gae(*draw(100), **given))


@pytest.mark.parametrize("name", ["trajectory_offsets", "turn_offsets"])
def test_offsets_without_an_element_are_refused(name):
    given = {"trajectory_offsets": torch.tensor([0, 3]), name: torch.zeros(0, dtype=torch.int64)}
    with pytest.raises(ValueError, match=name):
        ops.gae(torch.zeros(3), torch.zeros(3), **given)


def test_a_turn_that_crosses_the_end_of_a_trajectory_is_refused(raises):
    if not raises:
        pytest.skip("the extension on a GPU reads no offset back")
    reward = torch.ones(10)
    turns, trajectories = torch.tensor([0, 2, 6, 10]), torch.tensor([0, 4, 10])
    with pytest.raises(ValueError, match="a trajectory starts at 4, inside a turn"):
        ops.gae(reward, reward, trajectories, turn_offsets=turns)
