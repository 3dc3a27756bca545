import pytest
import torch

from megatron_stppo.algorithm.aggregation import token_weights

# Trajectory 0: turns of 3 and 1 tokens. Trajectory 1: one turn of 2. Trajectory 2 failed: one turn of 2.
TURNS, TRAJECTORIES = torch.tensor([0, 3, 4, 6, 8]), torch.tensor([0, 4, 6, 8])
LIVE = torch.tensor([True] * 6 + [False] * 2)


def test_weights_by_hand():
    expected = {
        "token_mean": [1 / 6] * 6,
        "turn_mean": [1 / 9] * 3 + [1 / 3] + [1 / 6] * 2,
        "sequence_mean_token_mean": [1 / 8] * 4 + [1 / 4] * 2,
    }
    for kind, weights in expected.items():
        assert token_weights(kind, LIVE, TURNS, TRAJECTORIES).tolist() == pytest.approx([*weights, 0, 0])
        assert sum(weights) == pytest.approx(1)


def test_nothing_live_gives_zero_weights():
    for kind in ("token_mean", "turn_mean", "sequence_mean_token_mean"):
        assert not token_weights(kind, torch.zeros(8, dtype=torch.bool), TURNS, TRAJECTORIES).any()


def test_unknown_aggregation_is_named():
    with pytest.raises(ValueError, match="aggregation='mean'"):
        token_weights("mean", LIVE, TURNS, TRAJECTORIES)
