from __future__ import annotations

from functools import partial

import pytest
import torch

from megatron_stppo.algorithm.losses import LOSSES
from megatron_stppo.algorithm.own import check_loss
from megatron_stppo.config import algorithm


def gradient(
    name: str, ratios: list[float], advantages: list[float], low: float = 0.0, high: float = 5.0
) -> list[float]:
    """Return the derivatives of the summed loss with respect to the log-probs."""
    old_T = torch.full((len(ratios),), -2.0, dtype=torch.float64)
    logprob_T = (old_T + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    LOSSES[name](logprob_T, old_T, torch.tensor(advantages), None, low=low, high=high).sum().backward()
    assert logprob_T.grad is not None
    return logprob_T.grad.tolist()


def test_cispo_limits_the_ratio_and_keeps_the_gradient() -> None:
    found = gradient("cispo", [6.0, 4.0, 6.0, 0.5], [2.0, 1.0, -1.0, 1.0])
    assert found == pytest.approx([-10, -4, 5, -0.5])
    assert gradient("cispo", [0.5], [1.0], low=0.8) == pytest.approx([-0.8])


def test_the_configuration_knows_all_names() -> None:
    assert tuple(LOSSES) == algorithm.LOSSES


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_passes_the_check_of_a_users_loss(name: str) -> None:
    check_loss(partial(LOSSES[name], low=0.8, high=1.2))
