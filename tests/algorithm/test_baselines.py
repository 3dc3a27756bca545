"""Advantages of turns relative to the turns of their group. Those of episodes: tests/training."""

from __future__ import annotations

import pytest
import torch

from megatron_stppo.algorithm.baselines import group_relative, same_index, same_state, turn_returns

LIVE = torch.tensor([True, True, True])


def owners(*turns: int) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(turns)), torch.tensor(turns))


def test_the_return_of_a_turn_is_its_reward_and_the_discounted_ones_of_later_turns() -> None:
    # turns of 2, 1 and 1 tokens with the rewards 1, 0, 2; then another trajectory of one turn with reward 8
    reward_T = torch.tensor([0.0, 1.0, 0.0, 2.0, 8.0])
    turns, trajectories = torch.tensor([0, 2, 3, 4, 5]), torch.tensor([0, 4, 4, 5])
    assert turn_returns(reward_T, turns, trajectories, 0.5).tolist() == [1.5, 1.0, 2.0, 8.0]
    assert turn_returns(reward_T, turns, trajectories, 1.0).tolist() == [3.0, 2.0, 2.0, 8.0]


def relative(same, return_S, owner_S, group_N, counted_N=LIVE, state_S=None, normalised=False) -> list[float]:
    cell_S, counted_S = same(owner_S, group_N, counted_N, state_S)
    live_S = torch.ones_like(owner_S, dtype=torch.bool)
    return group_relative(torch.tensor(return_S), cell_S, live_S, normalised, counted_S).tolist()


def test_a_turn_is_compared_with_the_turns_of_the_same_index_and_the_last_ones_with_the_last_common_index():
    # Episodes of 1, 2 and 4 turns. Index 0: 1, 2, 6, mean 3. Index 1: 4, 8, and 5 and 3 after it, mean 5.
    found = relative(same_index, [1.0, 2, 4, 6, 8, 5, 3], owners(1, 2, 4), torch.zeros(3))
    assert found == [-2.0, -1.0, -1.0, 3.0, 3.0, 0.0, -2.0]


def test_turns_of_other_groups_are_not_compared():
    found = relative(same_index, [1.0, 3, 5], owners(1, 1, 1), torch.tensor([4, 4, 2]))
    assert found == [-1.0, 1.0, 0.0]


def test_the_mean_of_an_index_counts_the_first_history_of_an_episode():
    # the second trajectory is a further history: 9 is not in the mean (1 + 3) / 2
    counted_N = torch.tensor([True, False, True])
    assert relative(same_index, [1.0, 9, 3], owners(1, 1, 1), torch.zeros(3), counted_N) == [-1.0, 7.0, 1.0]
    # only one counted episode has index 1, so that its turns are among those of index 0: mean (1 + 3 + 5) / 3
    found = relative(same_index, [1.0, 9, 9, 3, 5], owners(1, 2, 2), torch.zeros(3), counted_N)
    assert found == [-2.0, 6.0, 6.0, 0.0, 2.0]


def test_turns_that_begin_in_the_same_state_are_compared_at_any_index_and_within_an_episode():
    # State 5: returns 1 and 3 of the first episode, 8 of the second: mean 4. State 6 occurs once; 0 is none.
    state_S = torch.tensor([5, 5, 6, 5, 0, 0])
    found = relative(same_state, [1.0, 3, 7, 8, 1, 2], owners(2, 4), torch.zeros(2), None, state_S)
    assert found == [-3.0, -1.0, 0.0, 4.0, 0.0, 0.0]
    other = relative(same_state, [1.0, 3], owners(1, 1), torch.tensor([0, 1]), None, torch.tensor([5, 5]))
    assert other == [0.0, 0.0], "the same state in another task"


@pytest.mark.parametrize("same", [same_index, same_state])
def test_no_turns_have_no_cells(same) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert [len(x) for x in same(none, torch.zeros(2), LIVE[:2], none)] == [0, 0]
