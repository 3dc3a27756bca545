import pytest
import torch

from megatron_stppo.algorithm.aggregation import live_counts, token_weights

# Trajectory 0: turns of 3 and 1 tokens. Trajectory 1: one turn of 2. Trajectory 2 failed: one turn of 2.
TURNS, TRAJECTORIES = torch.tensor([0, 3, 4, 6, 8]), torch.tensor([0, 4, 6, 8])
LIVE = torch.tensor([True] * 6 + [False] * 2)


def test_weights_by_hand():
    assert live_counts(LIVE, TURNS, TRAJECTORIES).tolist() == [6, 3, 2]
    expected = {
        "token_mean": [1 / 6] * 6,
        "turn_mean": [1 / 9] * 3 + [1 / 3] + [1 / 6] * 2,
        "sequence_mean_token_mean": [1 / 8] * 4 + [1 / 4] * 2,
    }
    for kind, weights in expected.items():
        assert token_weights(kind, LIVE, TURNS, TRAJECTORIES).tolist() == pytest.approx([*weights, 0, 0])


def test_parts_of_a_minibatch_get_the_weights_of_the_whole():
    parts = [
        (LIVE[:4], torch.tensor([0, 3, 4]), torch.tensor([0, 4])),
        (LIVE[4:], torch.tensor([0, 2, 4]), torch.tensor([0, 2, 4])),
    ]
    counts = sum(live_counts(*part) for part in parts)
    for kind in ("token_mean", "turn_mean", "sequence_mean_token_mean"):
        whole = token_weights(kind, LIVE, TURNS, TRAJECTORIES)
        cut = torch.cat([token_weights(kind, *part, counts) for part in parts])
        torch.testing.assert_close(cut, whole)
        assert whole.sum().item() == pytest.approx(1.0)


def test_nothing_live_gives_zero_weights():
    for kind in ("token_mean", "turn_mean", "sequence_mean_token_mean"):
        assert not token_weights(kind, torch.zeros(8, dtype=torch.bool), TURNS, TRAJECTORIES).any()


def test_unknown_aggregation_is_named():
    with pytest.raises(ValueError, match="aggregation='mean'"):
        token_weights("mean", LIVE, TURNS, TRAJECTORIES)
