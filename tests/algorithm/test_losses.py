from __future__ import annotations

from functools import partial

import pytest
import torch

from megatron_stppo.algorithm.losses import LOSSES
from megatron_stppo.algorithm.own import check_loss
from megatron_stppo.algorithm.surrogate import surrogate
from megatron_stppo.config import algorithm


def gradient(
    name: str,
    ratios: list[float],
    advantages: list[float],
    offsets: list[int] | None = None,
    low: float = 0.0,
    high: float = 5.0,
) -> list[float]:
    """Return the derivatives of the summed loss with respect to the log-probs."""
    old_T = torch.full((len(ratios),), -2.0, dtype=torch.float64)
    logprob_T = (old_T + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    given = (logprob_T, old_T, torch.tensor(advantages), None if offsets is None else torch.tensor(offsets))
    LOSSES[name](*given, low=low, high=high).sum().backward()
    assert logprob_T.grad is not None
    return logprob_T.grad.tolist()


def test_cispo_limits_the_ratio_and_keeps_the_gradient() -> None:
    found = gradient("cispo", [6.0, 4.0, 6.0, 0.5], [2.0, 1.0, -1.0, 1.0])
    assert found == pytest.approx([-10, -4, 5, -0.5])
    assert gradient("cispo", [0.5], [1.0], low=0.8) == pytest.approx([-0.8])


def test_a_token_of_gspo_token_has_its_own_advantage_and_the_ratio_of_its_segment() -> None:
    """A segment with ratios 4 and 1, so w = 2, and one with ratio 1."""
    found = gradient("gspo_token", [4.0, 1.0, 1.0], [1.0, 3.0, -1.0], [0, 2, 3])
    assert found == pytest.approx([-2, -6, 1])
    clipped = gradient("gspo_token", [4.0, 1.0], [1.0, -3.0], [0, 2], high=1.5)
    assert clipped == pytest.approx([0, 6]), "clipped where the advantage is positive"


def test_gspo_token_equals_the_surrogate_where_advantages_are_equal_inside_segments() -> None:
    generator = torch.Generator().manual_seed(0)
    logprob_T, old_T = -torch.rand(2, 9, generator=generator, dtype=torch.float64)
    advantage_T = torch.tensor([1.0, 1, 1, -2, 0.5, 0.5, 0.5, 0.5, 0.5], dtype=torch.float64)
    offsets, weight_T = torch.tensor([0, 3, 4, 9]), torch.ones(9)
    expected = surrogate(logprob_T, old_T, advantage_T, weight_T, offsets, clip_low=0.1, clip_high=0.1)
    logprob_T.requires_grad_()
    LOSSES["gspo_token"](logprob_T, old_T, advantage_T, offsets, low=0.9, high=1.1).sum().backward()
    torch.testing.assert_close(-logprob_T.grad, expected.gradient_T.double())


def test_topr_has_no_ratio_where_the_advantage_is_positive_and_at_most_1_elsewhere() -> None:
    """Segments with w = 2, 1/2 and 4; the last advantage of the first segment is negative."""
    ratios, offsets = [4.0, 1.0, 0.25, 1.0, 4.0], [0, 2, 4, 5]
    found = gradient("topr", ratios, [3.0, -1.0, -1.0, -2.0, 1.0], offsets, low=0, high=1)
    assert found == pytest.approx([-3, 1, 0.5, 1, -1])


def test_the_gradient_of_topr_is_that_of_reinforce_where_no_ratio_is_below_1() -> None:
    generator = torch.Generator().manual_seed(0)
    ratios = (1 + torch.rand(6, generator=generator)).tolist()
    advantages = torch.randn(6, generator=generator).tolist()
    found = gradient("topr", ratios, advantages, [0, 2, 6], low=0, high=1)
    assert found == pytest.approx([-advantage for advantage in advantages])


def test_the_configuration_knows_all_names() -> None:
    assert tuple(LOSSES) == algorithm.LOSSES


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_passes_the_check_of_a_users_loss(name: str) -> None:
    check_loss(partial(LOSSES[name], low=0.8, high=1.2))
