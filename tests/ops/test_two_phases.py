"""Turns in parts, as on ranks of context parallelism: sum each part, add the sums, finish each part."""

import sys

import pytest
import torch

from tests.ops.draws import offsets_of, three, uniform

surrogate = sys.modules["megatron_stppo.ops.clipped_surrogate"]
pytestmark = pytest.mark.usefixtures("device")
LENGTHS = [3, 0, 700, 33_000, 1, 40, 5000]  # 33,000 tokens are more than one block processes alone


@pytest.mark.parametrize(
    ("pooling", "dual", "power", "scale"),
    [("mean", None, 0.0, 0.5), ("sum", 1.5, 0.0, 0.02), ("mean", 1.5, 1.0, 0.5)],
)
def test_two_parts_of_every_turn_make_the_whole(pooling, dual, power, scale):
    total = sum(LENGTHS)
    inputs, sum_p_sq = (*three(total, scale=scale), uniform(total)), 0.5 + uniform(total, seed=1) / 2

    def compute(tensors, offsets, sum_p_sq, sums):
        bounds = (0.2, 0.2, dual, power, pooling)
        out = surrogate.computed(surrogate.Given(*tensors, offsets, bounds, sum_p_sq), True, sums)
        objective, *statistics = out[0]
        return surrogate.ClippedSurrogate(objective, out[1], *statistics, *out[2:])

    whole = compute(inputs, offsets_of(*LENGTHS), sum_p_sq, None)
    first = torch.arange(total) % 5 < 2  # two fifths of every turn
    counts = torch.stack([part.sum() for part in first.long().split(LENGTHS)])
    parts = []
    for chosen, own in ((first, counts), (~first, torch.tensor(LENGTHS) - counts)):
        offsets = torch.nn.functional.pad(own.cumsum(0), (1, 0))
        parts.append((chosen, [x[chosen] for x in inputs], offsets))
    sums = sum(surrogate.summed(surrogate.Given(*part, offsets)) for _, part, offsets in parts)
    outs = [(c, compute(part, offsets, sum_p_sq[c], sums)) for c, part, offsets in parts]
    assert whole.clipped > 0
    for chosen, out in outs:
        torch.testing.assert_close(out.ratio, whole.ratio, rtol=1e-6, atol=0)
        torch.testing.assert_close(out.grad_T, whole.grad_T[chosen])
        torch.testing.assert_close(out.bias_T, whole.bias_T[chosen])
    for name in ("objective", "bias_sq", "grad_sq", "clipped", "tokens", "logit_bias_sq", "logit_grad_sq"):
        together = sum(float(getattr(out, name)) for _, out in outs)
        assert together == pytest.approx(float(getattr(whole, name)), rel=1e-5, abs=1e-9), name
