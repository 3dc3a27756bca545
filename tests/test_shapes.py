from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_stppo.training.advantage import kl, with_kl_penalty
from tests.training.test_advantage import scored, trajectory


def test_a_function_of_the_mathematics_refuses_two_sizes_for_one_letter() -> None:
    with pytest.raises(TypeError, match="kl: reference_logprob_T has 2 entries, logprob_T has 3"):
        kl("k1", torch.zeros(3), torch.zeros(2))


def test_a_batch_refuses_two_sizes_for_one_letter() -> None:
    batch = scored([trajectory([0.0, 1.0])])
    with pytest.raises(TypeError, match="ScoredBatch: value_T has 3 entries, action_index_T has 4"):
        replace(batch, value_T=torch.zeros(3))
    assert with_kl_penalty(scored([trajectory([0.0])]), 0.1).tolist() == pytest.approx([-0.2, -0.2])
