"""The checks of a loss and of an advantage of the user, and the functions of examples/own_algorithm."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch

from examples.own_algorithm.recipe import cispo, leave_one_out, over_batch
from megatron_stppo.algorithm.own import LOSSES, check_advantage, check_loss
from megatron_stppo.config import algorithm


def test_the_example_of_a_loss_passes_and_keeps_the_gradient_of_a_limited_token() -> None:
    check_loss(cispo)
    logprob_T = torch.tensor([2.0, 1.1, 0.5]).log().requires_grad_()
    loss_T = cispo(logprob_T, torch.zeros(3), torch.tensor([1.0, 1.0, -2.0]), None)
    loss_T.sum().backward()
    assert logprob_T.grad.tolist() == pytest.approx([-1.28, -1.1, 1.0])  # - ratio * advantage


def test_the_example_of_an_advantage_passes_and_leaves_one_out() -> None:
    check_advantage(leave_one_out)
    # group 0: 1 - 0, 0 - 1, and a failed one that no mean counts; group 1: a single trajectory
    counted_N = torch.tensor([True, True, False, True])
    found_N = leave_one_out(torch.tensor([1.0, 0.0, 5.0, 3.0]), torch.tensor([0, 0, 0, 1]), counted_N)
    assert found_N[counted_N].tolist() == [1.0, -1.0, 0.0]


def test_the_example_of_an_advantage_over_the_batch_passes_and_divides_by_one_deviation() -> None:
    check_advantage(over_batch)
    # group means 1 and 1.5: (1, -1) and (1.5, -1.5), whose deviation is sqrt(6.5 / 4)
    outcome_N, group_N = torch.tensor([2.0, 0, 3, 0]), torch.tensor([0, 0, 1, 1])
    found_N = over_batch(outcome_N, group_N, torch.ones(4, dtype=torch.bool)) * 1.625**0.5
    assert found_N.tolist() == pytest.approx([1, -1, 1.5, -1.5])


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            lambda new, old, a, o: -((new - old).exp() * a).mean(),
            "loss: returned torch.float32 [] for 9 inputs",
        ),
        (
            lambda new, old, a, o: -(new - old).exp() * a.mean(),
            "loss: a token's loss depends on other segments",
        ),
        (lambda new, old, a, o: -(new.detach() - old) * a, "loss: its result has no gradient"),
        (lambda new, old, a, o: -(new - old).sqrt() * a, "loss: returned numbers that are not finite"),
        (lambda new, old, a, o: (new * 0).sqrt(), "loss: its gradient: returned numbers that are not finite"),
        (
            lambda new, old, a, o: -((new + 1e7) - (old + 1e7)).exp() * a,
            "loss: values in float32 and float64",
        ),
    ],
)
def test_a_loss_that_would_train_wrongly_is_refused(loss, message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        check_loss(loss)


def test_an_advantage_that_divides_by_the_deviation_of_equal_outcomes_is_refused() -> None:
    with pytest.raises(ValueError, match="not finite"):
        check_advantage(lambda outcome_N, group_N, counted_N: (outcome_N - 1) / outcome_N.std())


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
