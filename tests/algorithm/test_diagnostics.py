import math

import pytest
import torch

from megatron_stppo.algorithm import diagnostics

ALL = torch.ones(4, dtype=torch.bool)


def test_explained_variance_by_hand_and_over_parts():
    # R varies by 1/4, what the critic leaves by 1/16.
    returns, value = torch.tensor([0.0, 1, 0, 1]), torch.tensor([0.25, 0.75, 0.25, 0.75])
    whole = diagnostics.value_moments(value, returns, ALL)
    assert diagnostics.explained_variance(whole) == pytest.approx(0.75)
    halves = [diagnostics.value_moments(value[i : i + 2], returns[i : i + 2], ALL[:2]) for i in (0, 2)]
    assert diagnostics.explained_variance(halves[0] + halves[1]) == pytest.approx(0.75)


def test_explained_variance_of_constant_returns_is_undefined():
    assert math.isnan(
        diagnostics.explained_variance(diagnostics.value_moments(torch.rand(4), torch.full((4,), 0.1), ALL))
    )
    nothing = diagnostics.value_moments(torch.rand(4), torch.rand(4), ~ALL)
    assert math.isnan(diagnostics.explained_variance(nothing))


def test_ratio_quantiles_interpolate():
    out = diagnostics.ratio_quantiles(torch.tensor([1.2, 0.8, 1.0]), (0.0, 0.25, 0.5, 1.0))
    assert out == pytest.approx({0.0: 0.8, 0.25: 0.9, 0.5: 1.0, 1.0: 1.2})
    assert diagnostics.ratio_quantiles(torch.zeros(0), (0.5,)) == {0.5: 1.0}


def test_mismatch_summary_by_hand():
    # Weights 2 and 1 over two live tokens: mean |d| = ln2/2, mean 3/2, effective share 9 / (2 * 5).
    old = torch.tensor([2.0, 1.0, 9.0]).log()
    moments = diagnostics.mismatch_moments(old, torch.zeros(3), torch.tensor([True, True, False]))
    assert diagnostics.mismatch_summary(moments) == pytest.approx((math.log(2) / 2, 1.5, 0.9))
