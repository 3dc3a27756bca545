"""Edge cases of the clipped surrogate: numbers, shapes and memory."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stppo import ops
from megatron_stppo.algorithm.surrogate import surrogate
from tests.ops.draws import fallback, integers, normal, offsets_of, three, unaligned, uniform

pytestmark = pytest.mark.usefixtures("device")
NAN, INF = math.nan, math.inf
# On a GPU, 8 lanes, a warp, a block or several blocks process a segment; there is one length for each case.
LENGTHS = (3, 40, 600, 33_000)


def one(bound):
    """Return a bound as float32, and the floats before and after it."""
    exact = torch.tensor(bound)
    return [torch.nextafter(exact, torch.tensor(-INF)), exact, torch.nextafter(exact, torch.tensor(INF))]


@pytest.mark.parametrize("length", [1, *LENGTHS[:3]])
@pytest.mark.parametrize(("bound", "sign"), [(1.2, 1.0), (0.8, -1.0)])
def test_a_ratio_on_its_bound_is_not_clipped_and_the_next_float_is(bound, sign, length):
    for place, ratio in enumerate(one(bound)):
        # log in float64, split into what float32 holds and the rest, so that exp gives this very ratio
        delta = ratio.double().log()
        new, old = delta.float(), (delta.float().double() - delta).float()
        given = (x.expand(length).contiguous() for x in (new, old))
        advantage = torch.full((length,), sign)
        out = ops.clipped_surrogate(*given, advantage, offsets_of(length) if length > 1 else None)
        assert out.ratio.item() == ratio.item()
        beyond = place == (2 if sign > 0 else 0)
        assert out.clip_fraction.item() == float(beyond)
        assert out.grad_T.sum().item() == (0 if beyond else pytest.approx(sign * ratio.item(), rel=1e-5))


@pytest.mark.parametrize("dual", [1.1, 2.7])
def test_a_ratio_on_the_dual_bound_keeps_its_gradient_and_the_next_float_loses_it(dual):
    for place, ratio in enumerate(one(dual)):
        delta = ratio.double().log()
        new, old = delta.float()[None], (delta.float().double() - delta).float()[None]
        out = ops.clipped_surrogate(new, old, torch.full((1,), -1.0), None, dual_clip=dual)
        assert out.ratio.item() == ratio.item()
        assert out.grad_T.item() == (0 if place == 2 else pytest.approx(-ratio.item(), rel=1e-5))
        assert out.clipped.item() == 0


@pytest.mark.parametrize("length", LENGTHS)
def test_an_advantage_of_minus_infinity_makes_the_objective_minus_infinity(length):
    advantage = torch.ones(length)
    advantage[length // 2] = -INF
    for segments in (None, offsets_of(length)):
        out = ops.clipped_surrogate(torch.zeros(length), torch.zeros(length), advantage, segments)
        assert out.objective.item() == -INF


@pytest.mark.parametrize("length", LENGTHS)
def test_advantages_of_zero_of_either_sign_add_nothing_and_are_never_clipped(length):
    advantage = torch.zeros(length)
    advantage[::2] = -0.0
    for beyond, segments in itertools.product((1.0, -1.0), (None, offsets_of(length))):  # of either bound
        new = torch.full((length,), beyond)
        out = ops.clipped_surrogate(new, torch.zeros(length), advantage, segments, with_bias=True)
        sums = (out.objective, out.clipped, out.bias_sq, out.grad_sq)
        assert [x.item() for x in sums] == [0, 0, 0, 0]
        assert not out.grad_T.any() and not out.bias_T.any()
        assert out.tokens.item() == length


def test_empty_segments_have_ratio_1_and_change_nothing_else():
    new, old, advantage = three(9)
    full = ops.clipped_surrogate(new, old, advantage, offsets_of(4, 5), with_bias=True)
    holes = ops.clipped_surrogate(new, old, advantage, offsets_of(0, 0, 4, 0, 5, 0), with_bias=True)
    assert holes.ratio[[0, 1, 3, 5]].tolist() == [1, 1, 1, 1]
    assert holes.ratio[[2, 4]].equal(full.ratio)
    for name in ("objective", "grad_T", "bias_T", "clipped", "bias_sq", "grad_sq", "kl_k1", "kl_k3"):
        assert getattr(holes, name).equal(getattr(full, name)), name
    many = ops.clipped_surrogate(new, old, advantage, offsets_of(*[0] * 9000, 4, 5), with_bias=True)
    assert many.grad_T.equal(full.grad_T) and many.ratio[:9000].eq(1).all()


@pytest.mark.parametrize("length", LENGTHS)
def test_without_valid_tokens_all_sums_are_0_and_backward_runs(length):
    logprob = normal(length).requires_grad_()
    old = torch.full((length,), INF)
    for segments in (None, offsets_of(1, length - 1)):
        out = ops.clipped_surrogate(
            logprob, old, torch.full((length,), NAN), segments, weight=torch.zeros(length)
        )
        sums = (out.objective, out.tokens, out.clipped, out.bias_sq, out.grad_sq, out.kl_k1, out.kl_k3)
        assert [x.item() for x in sums] == [0] * 7
        (gradient,) = torch.autograd.grad(out.objective, logprob)
        assert not gradient.any()


@pytest.mark.parametrize("length", LENGTHS)
def test_a_masked_token_may_have_any_advantage(length):
    new, old, advantage = three(length)
    weight = (uniform(length) < 0.5).float()
    weight[0] = 1
    spoiled = torch.where(weight == 0, torch.tensor([NAN, INF, -INF]).repeat(length)[:length], advantage)
    clean = torch.where(weight == 0, 0, advantage)
    for segments in (None, offsets_of(length)):
        a, b = (
            ops.clipped_surrogate(new, old, x, segments, weight=weight, with_bias=True)
            for x in (spoiled, clean)
        )
        assert a.objective.isfinite() and a.objective.equal(b.objective)
        assert a.grad_T.equal(b.grad_T) and a.bias_T.equal(b.bias_T) and a.clipped.equal(b.clipped)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_nan_of_a_valid_token_reaches_the_objective(length):
    new, old, advantage = three(length + 5)
    new[length // 2] = NAN
    out = ops.clipped_surrogate(new, old, advantage, offsets_of(length, 5))
    assert out.objective.isnan() and out.ratio[0].isnan() and out.ratio[1].isfinite()
    assert out.grad_T[:length].isnan().all() and out.grad_T[length:].isfinite().all()


def test_arrays_may_start_at_any_element():
    new, old, advantage = three(5000)
    weight, sum_p_sq, segments = uniform(5000), uniform(5000, seed=1), offsets_of(1, 30, 700, 4269)

    def at(by):
        moved = [unaligned(x, by) for x in (new, old, advantage, segments, weight, sum_p_sq)]
        return ops.clipped_surrogate(*moved[:4], weight=moved[4], sum_p_sq=moved[5], with_bias=True)

    for by in (1, 2, 3):
        assert at(by).ratio.equal(at(0).ratio) and at(by).grad_T.equal(at(0).grad_T)
        torch.testing.assert_close(at(by)[:-1], at(0)[:-1], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "wrong",
    [
        [0, 900, 300, 1000],
        [0, 600, 500, 1000],  # the second turn would overlap the first
        [1, 1000],
        [0, 999],
        [0, 1001],
        [0, -5, 1000],
        [0, 2**40, 1000],
    ],
)
def test_offsets_out_of_order_are_an_error_or_nan_and_corrupt_no_memory(wrong, raises):
    refuse(wrong, 1000, [400, 600], raises)


@pytest.mark.parametrize(
    "wrong",
    [
        [0, *[600, 0] * 1000, 120_000],  # more long turns in a tile than its list can hold
        [0, *[1, 700] * 3000, 120_000],
        [0, 90_000, 10, 60_000, 120_000],  # giants that overlap
    ],
    ids=["back and forth", "zigzag", "giants"],
)
def test_long_turns_out_of_order_corrupt_no_memory(wrong, raises):
    refuse(wrong, 120_000, [50_000, 40_000, 30_000], raises)


def refuse(wrong, total, right, raises):
    given = three(total)
    expected = ops.clipped_surrogate(*given, offsets_of(*right))
    if raises:
        with pytest.raises(ValueError, match="segment_offsets"):
            ops.clipped_surrogate(*given, torch.tensor(wrong))
    else:
        assert ops.clipped_surrogate(*given, torch.tensor(wrong)).objective.isnan()
    assert ops.clipped_surrogate(*given, offsets_of(*right)).grad_T.equal(expected.grad_T)


def test_turns_of_1_to_131072_tokens_agree_with_float64():
    lengths = [1, 7, 40_000, 33_000, 1, 12, 131_072, 700, 1, 1]
    new, old, advantage = three(sum(lengths), scale=0.1)
    weight, new = uniform(sum(lengths)), new + 0.1
    out = ops.clipped_surrogate(new, old, advantage, offsets_of(*lengths), weight=weight, with_bias=True)
    product = (weight.double() * advantage.double()).split(lengths)
    for s, (delta, term) in enumerate(
        zip((new.double() - old.double()).split(lengths), product, strict=True)
    ):
        ratio = delta.mean().exp()
        kept = (term * ((term > 0) & (ratio <= 1.2) | (term < 0) & (ratio >= 0.8))).sum()
        removed = term.sum() - kept
        assert out.ratio[s].item() == pytest.approx(ratio.item(), rel=1e-7)
        for coefficients, total in ((out.grad_T, kept), (out.bias_T, removed)):
            mine = coefficients.split(lengths)[s]
            assert mine.unique().numel() == 1
            assert mine[0].item() == pytest.approx((ratio * total / len(delta)).item(), rel=1e-5, abs=1e-9)


TURNS = st.one_of(st.integers(0, 8), st.integers(0, 40), st.sampled_from([511, 512, 513, 4095, 4097, 32_769]))


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(TURNS, max_size=8),
    segments=st.booleans(),
    dual=st.sampled_from([None, 1.5]),
    pooling=st.sampled_from(["mean", "sum"]),
    weighted=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_every_output_equals_the_fallbacks(lengths, segments, dual, pooling, weighted, seed):
    total = sum(lengths)
    given = three(total, seed=seed)
    settings = {
        "weight": integers(3, total, seed=seed).float() if weighted else 0.01,
        "sum_p_sq": uniform(total, seed=seed),
        "dual_clip": dual,
        "pooling": pooling,
        "with_bias": True,
        "clip_low": 0.1,
    }
    cut = offsets_of(*lengths) if segments else None
    mine = ops.clipped_surrogate(*given, cut, **settings)
    with fallback():
        expected = ops.clipped_surrogate(*given, cut, **settings)
    for name, value in mine._asdict().items():
        other = getattr(expected, name)
        largest = float(other.abs().max()) if other.numel() else 0.0
        torch.testing.assert_close(value, other, rtol=2e-5, atol=1e-6 * max(1.0, largest), msg=name)


def test_gradcheck_of_the_fallback_in_float64():
    new, old, advantage = (x.double() for x in three(12))
    weight, cut = uniform(12).double(), offsets_of(3, 0, 1, 8)

    def objective(x):
        out = surrogate(x.detach(), old, advantage, weight, cut, clip_low=0.1, clip_high=0.1, dual_clip=1.5)
        return out.objective + (out.gradient_T * (x - x.detach())).sum()

    assert torch.autograd.gradcheck(objective, new.requires_grad_())
