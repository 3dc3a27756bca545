from typing import get_args

import pytest
import torch

from megatron_stppo.algorithm.aggregation import Aggregation, token_weights

KINDS = get_args(Aggregation)

# Trajectory 0: turns of 3 and 1 tokens. Trajectory 1: one turn of 2. Trajectory 2 failed: one turn of 2.
TURNS, TRAJECTORIES = torch.tensor([0, 3, 4, 6, 8]), torch.tensor([0, 4, 6, 8])
LIVE = torch.tensor([True] * 6 + [False] * 2)


def test_aggregation_weights_match_a_hand_calculation():
    expected = {
        "token_mean": [1 / 6] * 6,
        "turn_mean": [1 / 9] * 3 + [1 / 3] + [1 / 6] * 2,
        "episode_mean": [1 / 8] * 4 + [1 / 4] * 2,
        "sequence_mean_token_mean": [1 / 8] * 4 + [1 / 4] * 2,
        "sequence_mean_token_sum": [1 / 2] * 6,
        "sequence_mean_token_sum_norm": [1 / 20] * 6,
    }
    assert set(expected) == set(KINDS)
    for kind, weights in expected.items():
        found = token_weights(kind, LIVE, TURNS, TRAJECTORIES, length=10)
        assert found.tolist() == pytest.approx([*weights, 0, 0])
        # a mean sums to 1; 3 tokens per trajectory on average, of a length of 10
        totals = {"sequence_mean_token_sum": 3, "sequence_mean_token_sum_norm": 0.3}
        assert sum(weights) == pytest.approx(totals.get(kind, 1))


def test_an_episode_of_two_histories_counts_once():
    """Trajectories of 4, 2 and 2 tokens. The first two are one episode; in the second case the last two are,
    and the last one is not live."""
    every = torch.ones(8, dtype=torch.bool)
    first_N = torch.tensor([True, False, True])
    weight_T = token_weights("episode_mean", every, TURNS, TRAJECTORIES, first_N=first_N)
    assert weight_T.tolist() == pytest.approx([1 / 12] * 6 + [1 / 4] * 2)
    first_N = torch.tensor([True, True, False])
    weight_T = token_weights("episode_mean", LIVE, TURNS, TRAJECTORIES, first_N=first_N)
    assert weight_T.tolist() == pytest.approx([1 / 8] * 4 + [1 / 4] * 2 + [0, 0])


def test_without_live_tokens_all_weights_are_zero():
    for kind in KINDS:
        assert not token_weights(kind, torch.zeros(8, dtype=torch.bool), TURNS, TRAJECTORIES, length=10).any()


def test_a_sum_over_a_constant_length_needs_that_length():
    with pytest.raises(ValueError, match="divides by a constant length"):
        token_weights("sequence_mean_token_sum_norm", LIVE, TURNS, TRAJECTORIES)


def test_unknown_aggregation_is_named():
    with pytest.raises(ValueError, match="aggregation='mean'"):
        token_weights("mean", LIVE, TURNS, TRAJECTORIES)
