"""Turns whose tokens are on several ranks, as with context parallelism."""

import pytest
import torch

from megatron_stppo import ops
from tests.ranks import run_ranks

WORLD = 3
LENGTHS = [7, 1, 0, 12, 300, 2]  # tokens of each turn


def draw():
    generator = torch.Generator().manual_seed(0)
    total = sum(LENGTHS)
    old = -torch.rand(total, generator=generator)
    new = old + 0.3 * torch.randn(total, generator=generator)
    weight = torch.rand(total, generator=generator).masked_fill(
        torch.rand(total, generator=generator) < 0.2, 0
    )
    sum_p_sq = 0.5 + 0.5 * torch.rand(total, generator=generator)
    return new, old, torch.randn(total, generator=generator), weight, sum_p_sq


def part_of(rank):
    """Return the token indices of a rank's part of every turn, of uneven sizes, and their offsets."""
    chosen, offsets, start = [], [0], 0
    for length in LENGTHS:
        cuts = [0, length // 4, length // 4 + length // 3, length]
        chosen += range(start + cuts[rank], start + cuts[rank + 1])
        offsets.append(len(chosen))
        start += length
    return torch.tensor(chosen, dtype=torch.int64), torch.tensor(offsets)


CASES = [
    {},
    {"pooling": "sum", "dual_clip": 2.0, "clip_low": 0.1},
    {"clip_length_power": 1.0, "dual_clip": 1.5},
]


def on_a_rank():
    import torch.distributed as dist

    nothing = torch.zeros(0)
    none = ops.clipped_surrogate(nothing, nothing, nothing, torch.tensor([0]), group=dist.group.WORLD)
    assert none.objective == 0 and none.tokens == 0 and len(none.ratio) == 0
    return [part_of_a_rank(settings) for settings in CASES]


def part_of_a_rank(settings):
    import torch.distributed as dist

    new, old, advantage, weight, sum_p_sq = draw()
    rows, offsets = part_of(dist.get_rank())
    logprob = new[rows].requires_grad_()
    out = ops.clipped_surrogate(
        logprob,
        old[rows],
        advantage[rows],
        offsets,
        weight=weight[rows],
        sum_p_sq=sum_p_sq[rows],
        with_bias=True,
        group=dist.group.WORLD,
        **settings,
    )
    (gradient,) = torch.autograd.grad(out.objective, logprob)
    # as lists, because a tensor would have to be fetched from this process, which ends
    return rows.tolist(), gradient.tolist(), [x.tolist() for x in out]


@pytest.fixture(scope="module")
def on_ranks(implementation):
    return run_ranks(on_a_rank, WORLD)


@pytest.mark.parametrize("case", range(len(CASES)))
def test_ranks_with_parts_of_turns_agree_with_one_rank_that_has_all(on_ranks, case):
    settings = CASES[case]
    new, old, advantage, weight, sum_p_sq = draw()
    offsets = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()])
    whole = ops.clipped_surrogate(
        new, old, advantage, offsets, weight=weight, sum_p_sq=sum_p_sq, with_bias=True, **settings
    )
    assert whole.clipped > 0
    parts = [cases[case] for cases in on_ranks]
    gradient, bias = torch.zeros(len(new)), torch.zeros(len(new))
    outs = [type(whole)(*map(torch.tensor, values)) for _, _, values in parts]
    for (rows, grad, _), out in zip(parts, outs, strict=True):
        torch.testing.assert_close(out.ratio, whole.ratio, rtol=1e-6, atol=0)
        gradient[rows], bias[rows] = torch.tensor(grad), out.bias_T
    torch.testing.assert_close(gradient, whole.grad_T)
    torch.testing.assert_close(bias, whole.bias_T)
    for name in ("objective", "bias_sq", "grad_sq", "clipped", "tokens", "logit_bias_sq", "logit_grad_sq"):
        total = sum(float(getattr(out, name)) for out in outs)
        assert total == pytest.approx(float(getattr(whole, name)), rel=1e-5), name
