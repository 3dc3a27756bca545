import math

import pytest
import torch

from megatron_stppo.algorithm.correction import (
    Unit,
    calibrated_norm,
    correction_scale,
    in_unit,
    squared_estimate,
)


def test_without_clipping_the_step_is_not_scaled():
    assert correction_scale(bias_norm=7.0, clipped_tokens=0, floor=1.0) == 1.0
    assert correction_scale(bias_norm=7.0, clipped_tokens=0, floor=0.0) == 1.0


def test_floor_1_never_enlarges_a_step():
    assert correction_scale(0.5, 3, floor=1.0) == 1.0
    assert correction_scale(4.0, 3, floor=1.0) == 0.25


def test_floor_0_is_the_papers_division():
    assert correction_scale(0.5, 3, floor=0.0) == 2.0
    assert correction_scale(4.0, 3, floor=0.0) == 0.25
    assert correction_scale(0.0, 3, floor=0.0) == 1.0  # nothing to divide by


def test_logit_estimate_is_the_norm_of_the_gradient_with_respect_to_the_logits():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 9, generator=generator, dtype=torch.float64, requires_grad=True)
    target = torch.randint(9, (6,), generator=generator)
    coefficient = torch.randn(6, generator=generator, dtype=torch.float64)
    log_p = logits.log_softmax(-1)
    logprob = log_p.gather(1, target[:, None]).squeeze(1)
    (gradient,) = torch.autograd.grad((coefficient * logprob).sum(), logits)
    estimate = squared_estimate("logit", coefficient, logprob, log_p.exp().square().sum(1))
    assert estimate.sqrt().item() == pytest.approx(gradient.norm().item())


def test_coefficient_estimate_is_the_sum_of_squares_and_adds_up():
    b = torch.tensor([3.0, 4.0])
    assert squared_estimate("coefficient", b, torch.zeros(2), torch.zeros(2)).item() == 25.0
    parts = [squared_estimate("coefficient", *(x[i : i + 1] for x in (b, b, b))).item() for i in range(2)]
    assert sum(parts) == 25.0


def test_tokens_without_coefficient_may_be_nan_and_rounding_gives_no_negative_norm():
    b = torch.tensor([0.0, 1.0])
    logprob, sum_p_sq = torch.tensor([math.nan, 0.0]), torch.tensor([math.nan, 0.9999999])
    assert squared_estimate("logit", b, logprob, sum_p_sq).item() == 0.0
    assert calibrated_norm(-1e-12, 1.0, 1.0) == 0.0


def test_calibration_scales_by_the_measured_gradient():
    # estimate(C) = 2, estimate(grad J) = 1, ||grad J|| = 0.5
    assert calibrated_norm(bias_sq=4.0, grad_sq=1.0, gradient_norm=0.5) == 1.0
    assert calibrated_norm(bias_sq=16.0, grad_sq=4.0, gradient_norm=0.5) == 1.0


@pytest.mark.parametrize("gradient_norm", [1e-3, 0.0])
def test_a_step_of_which_everything_is_clipped_is_the_limit_of_steps_of_which_little_is_left(
    gradient_norm: float,
) -> None:
    """A square of 1e-5 is clipped. The smaller the rest, the smaller the scale, down to 1e-7."""
    scales = []
    for grad_sq in (1e-5, 1e-9, 1e-13, 1e-30, 0.0):
        norm = gradient_norm or math.sqrt(grad_sq)
        relative = in_unit(calibrated_norm(1e-5, grad_sq, norm), "relative", tokens=1, gradient_norm=norm)
        scales.append(correction_scale(10 * relative, 1, floor=1.0))
    assert scales == pytest.approx([1e-1, 1e-3, 1e-5, 1e-7, 1e-7])
    assert calibrated_norm(0.0, 0.0, gradient_norm) == 0.0
    assert calibrated_norm(1.0, 1e-30, 1e-3) == calibrated_norm(1.0, 0.0, 1e-3) == 1e3


@pytest.mark.parametrize("unit", ["mean", "sum"])
def test_in_other_units_the_scale_does_not_return_to_1_where_nothing_is_left(unit: Unit) -> None:
    """The norm falls with what clipping leaves; before the clipping it was 0.1."""
    scales = []
    for rest in (1e-2, 1e-6, 1e-9, 0.0):
        norm = in_unit(calibrated_norm(1e-2, rest**2, rest), unit, tokens=1, gradient_norm=rest)
        scales.append(correction_scale(10 * norm, 1, floor=0.0))
    assert scales == pytest.approx([scales[0]] * 4)


def test_sum_unit_counts_the_minibatchs_action_tokens():
    assert in_unit(0.01, "mean", tokens=400) == 0.01
    assert in_unit(0.01, "sum", tokens=400) == pytest.approx(4.0)
    # The same tokens in a loss that is the mean over 16 trajectories of sums over 25 tokens: 25 times that.
    assert in_unit(0.25, "mean", tokens=400, weight=25) == 0.25
    assert in_unit(0.25, "sum", tokens=400, weight=25) == pytest.approx(4.0)
    assert in_unit(0.0, "sum", tokens=0, weight=0) == 0.0


def test_relative_unit_is_a_multiple_of_the_remaining_gradient():
    # ||C|| = 0.5 with a gradient of 2, and both 10 times as large: a quarter. With 0.1: five times.
    assert in_unit(0.5, "relative", tokens=400, gradient_norm=2.0) == 0.25
    assert in_unit(5.0, "relative", tokens=400, gradient_norm=20.0) == 0.25
    assert correction_scale(in_unit(0.5, "relative", tokens=400, gradient_norm=0.1), 3, floor=1.0) == 0.2


def test_the_scale_falls_to_zero_with_the_remaining_gradient():
    # ||C|| = 1 and a remaining gradient: the scale falls with it, and is practically 0 if it is 0.
    left = [1.0, 0.1, 1e-3, 1e-5, 1e-9, 0.0]
    scales = [
        correction_scale(10 * in_unit(1.0, "relative", tokens=4, gradient_norm=g), 3, 1.0) for g in left
    ]
    assert scales == pytest.approx([1e-1, 1e-2, 1e-4, 1e-6, 1e-7, 1e-7])
    # Clipped tokens without a gradient, and no remaining gradient: the step is not changed.
    assert correction_scale(in_unit(0.0, "relative", tokens=4, gradient_norm=0.0), 3, floor=1.0) == 1.0


def test_without_a_norm_to_compare_with_the_size_is_the_largest_one():
    assert in_unit(0.5, "relative", tokens=4) == 1e6


@pytest.mark.parametrize("name", ["coefficient", "logit"])
def test_an_estimate_has_no_gradient(name):
    columns = torch.tensor([[0.5], [-0.7], [0.5]]).requires_grad_().unbind()
    for tracked in range(3):
        given = [column if at == tracked else column.detach() for at, column in enumerate(columns)]
        assert not squared_estimate(name, *given).requires_grad


def test_unknown_unit_is_named():
    with pytest.raises(ValueError, match="correction_unit='max'"):
        in_unit(0.5, "max", tokens=1)
