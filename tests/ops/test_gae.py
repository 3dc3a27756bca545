import math

import pytest
import torch

from megatron_stppo import ops

pytestmark = pytest.mark.usefixtures("device")


def test_gae_of_two_trajectories_matches_a_hand_calculation():
    # gamma = lambda = 1: the sum of future rewards minus the value.
    advantage, returns = ops.gae(
        torch.tensor([0.0, 1.0, 2.0]),
        torch.tensor([0.5, 0.25, 1.0]),
        torch.tensor([0, 2, 3], dtype=torch.int32),
    )
    assert advantage.tolist() == [0.5, 0.75, 1.0]
    assert returns.tolist() == [1.0, 1.0, 2.0]
    assert advantage.dtype == returns.dtype == torch.float32


def test_gae_of_no_tokens_is_empty():
    advantage, returns = ops.gae(torch.zeros(0), torch.zeros(0), torch.tensor([0]))
    assert len(advantage) == len(returns) == 0


def test_nan_stays_inside_its_trajectory():
    advantage, _ = ops.gae(
        torch.zeros(4), torch.tensor([1.0, 1.0, math.nan, 1.0]), torch.tensor([0, 2, 4]), lam=0.5
    )
    assert advantage.isfinite().tolist() == [True, True, False, True]
