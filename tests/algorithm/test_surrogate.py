"""The surrogate on numbers to check by hand: given ratios, log-probs their logarithms; clip 0.2, c = 1/T."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stppo.algorithm.ratio import segment_offsets, segment_ratio
from megatron_stppo.algorithm.surrogate import compared, decided, segment_sums, surrogate
from megatron_stppo.algorithm.variants import VARIANTS
from megatron_stppo.evidence.bench import defined_loss

TURNS = torch.tensor([0, 2, 4])
TRAJECTORY = torch.tensor([0, 4])
# Turn one: token ratios 1.44 and 1, geometric mean 1.2: on the bound. Turn two: 0.25 and 1, mean 0.5.
RATIOS = torch.tensor([1.44, 1.0, 0.25, 1.0], dtype=torch.float64)
ADVANTAGE = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)


lengths = st.lists(st.integers(0, 5), min_size=1, max_size=8)


def evaluate(ratios, advantage, offsets, weight=None, **given):
    ratios = torch.as_tensor(ratios, dtype=torch.float64)
    weight = torch.full_like(ratios, 1 / max(1, len(ratios))) if weight is None else weight
    advantage = torch.as_tensor(advantage, dtype=torch.float64)
    bounds = {"clip_low": 0.2, "clip_high": 0.2} | given
    return surrogate(ratios.log(), torch.zeros_like(ratios), advantage, weight, offsets, **bounds)


def by_variant(name, ratios=RATIOS, advantage=ADVANTAGE, **given):
    offsets = segment_offsets(VARIANTS[name]["segments"], TURNS, TRAJECTORY)
    return evaluate(ratios, advantage, offsets, **given)


@pytest.mark.parametrize("name", ["ppo", "s_ppo", "grpo"])
def test_token_level_variants_clip_each_token(name):
    # (1.2 + 1 - 0.8 - 1) / 4 = 0.1. Tokens 0 and 2 are clipped: 1.44 > 1.2, and 0.25 < 0.8 with A < 0.
    out = by_variant(name)
    assert out.objective.item() == pytest.approx(0.1)
    assert out.clipped_T.tolist() == [True, False, True, False]
    # g = c w A where not clipped: 1/4, -1/4. b = c w A where clipped: 0.36, -0.0625.
    assert out.gradient_T.tolist() == pytest.approx([0, 0.25, 0, -0.25])
    assert out.bias_T.tolist() == pytest.approx([0.36, 0, -0.0625, 0])


@pytest.mark.parametrize("name", ["turn_ppo", "st_ppo", "so_grpo"])
def test_turn_level_variants_clip_each_turn(name):
    # w = (1.2, 0.5), bound at 1.21. objective: (1.2 + 1.2 - 0.8 - 0.8) / 4 = 0.2. Turn two is clipped.
    out = by_variant(name, clip_high=0.21)
    assert out.objective.item() == pytest.approx(0.2)
    assert out.clipped_T.tolist() == [False, False, True, True]
    # S+ = 1/2 on turn one: g = 1.2/2 * 1/2 = 0.3. S- = -1/2 on turn two: b = 0.5/2 * -1/2 = -0.125.
    assert out.gradient_T.tolist() == pytest.approx([0.3, 0.3, 0, 0])
    assert out.bias_T.tolist() == pytest.approx([0, 0, -0.125, -0.125])


def test_gspo_has_one_ratio_per_trajectory():
    # w = (1.44 * 0.25)^(1/4) = 0.36^(1/4) = 0.7746 < 0.8. S+ = 1/2 is kept, S- = -1/2 is clipped at 0.8.
    out = by_variant("gspo")
    w = 0.36**0.25
    assert out.ratio_S.tolist() == pytest.approx([w])
    assert out.objective.item() == pytest.approx(w / 2 - 0.8 / 2)
    assert out.gradient_T.tolist() == pytest.approx([w / 4 / 2] * 4)
    assert out.bias_T.tolist() == pytest.approx([-w / 4 / 2] * 4)
    assert out.clipped_T.tolist() == [False, False, True, True]


def test_turn_ratio_is_geometric_mean_of_token_ratios():
    # Token ratios 8/2 = 4, 0.5/0.5 = 1 and 32/4 = 8.
    new, old = torch.tensor([[8.0, 0.5, 32.0], [2.0, 0.5, 4.0]]).log()
    ratio_S, divisor_S = segment_ratio(new, old, torch.tensor([0, 2, 3]))
    assert ratio_S.tolist() == pytest.approx([2.0, 8.0])
    assert divisor_S.tolist() == [2.0, 1.0]


def test_sum_pooling_is_the_product_of_token_ratios():
    out = evaluate([4.0, 0.25, 1.1], [1.0, 1.0, 1.0], torch.tensor([0, 3]), pooling="sum")
    assert out.ratio_S.tolist() == pytest.approx([1.1])
    # dw/dlogprob = w: g = 1.1 * (1/3 + 1/3 + 1/3)
    assert out.gradient_T.tolist() == pytest.approx([1.1] * 3)


def test_ratios_are_clipped_only_on_the_side_that_the_advantage_favours():
    # w = 3 with A < 0 and w = 0.1 with A > 0 keep their gradient c w A.
    out = evaluate([3.0, 0.1], [-1.0, 1.0], None)
    assert not out.clipped_T.any()
    assert out.gradient_T.tolist() == pytest.approx([-1.5, 0.05])


def test_the_bias_leaves_out_negative_advantages_with_a_large_ratio():
    # w = 100 with A = -1: the largest gradient of the two tokens is not part of C; w = 1.3 with A = 1 is.
    out = evaluate([100.0, 1.3], [-1.0, 1.0], None)
    assert out.gradient_T.tolist() == pytest.approx([-50, 0])
    assert out.bias_T.tolist() == pytest.approx([0, 0.65])


def test_at_the_limit_of_the_ratio_the_gradient_is_its_slope_and_not_0():
    # w = exp(20) for exp(30): the limited ratio does not depend on the log-prob, but the gradient is -w.
    out = evaluate([math.exp(30)], [-1.0], None)
    assert out.ratio_S.item() == pytest.approx(math.exp(20))
    assert out.gradient_T.item() == pytest.approx(-math.exp(20))


def test_mixed_signs_inside_a_turn_keep_the_unclipped_side():
    # w = 1.3: A = 1 is clipped, A = -1 is not. S+ = 1/2, S- = -1/2.
    out = evaluate([1.3, 1.3], [1.0, -1.0], torch.tensor([0, 2]))
    assert out.objective.item() == pytest.approx(1.2 / 2 - 1.3 / 2)
    assert out.gradient_T.tolist() == pytest.approx([-1.3 / 4] * 2)
    assert out.bias_T.tolist() == pytest.approx([1.3 / 4] * 2)
    assert out.clipped_T.tolist() == [True, False]


def test_dual_clip_bounds_the_loss_of_negative_advantages():
    # w = 4 with A = -1: -4 becomes -3, without gradient; it is not the clipping that the bias counts.
    out = evaluate([4.0], [-1.0], None, dual_clip=3.0)
    assert out.objective.item() == pytest.approx(-3.0)
    assert out.gradient_T.item() == 0 and out.bias_T.item() == 0
    assert not out.clipped_T.item()
    assert evaluate([2.9], [-1.0], None, dual_clip=3.0).gradient_T.item() == pytest.approx(-2.9)
    assert evaluate([2.0], [-1.0], None, dual_clip=2.0).gradient_T.item() == -2  # on the bound


def test_the_bounds_of_a_turn_follow_its_own_length():
    # Two turns, n = 1 and n = 4, of ratio 1.1 with A = 1, and of 0.9 with A = -1. p = 1: 1.2^(1/4) = 1.0466.
    n = torch.tensor([0, 1, 5])
    up = evaluate([1.1] * 5, [1.0] * 5, n, clip_length_power=1.0)
    assert up.clipped_T.tolist() == [False, True, True, True, True]
    assert up.objective.item() == pytest.approx((1.1 + 4 * 1.2**0.25) / 5)
    assert up.gradient_T.tolist() == pytest.approx([1.1 / 5, 0, 0, 0, 0])
    assert up.bias_T.tolist() == pytest.approx([0] + [1.1 / 5] * 4)
    down = evaluate([0.9] * 5, [-1.0] * 5, n, clip_length_power=1.0)
    assert down.clipped_T.tolist() == [False, True, True, True, True]
    assert down.objective.item() == pytest.approx(-(0.9 + 4 * 0.8**0.25) / 5)
    # p = 1/2: bounds 1.2^(1/2) = 1.095 and 0.8^(1/2) = 0.894 for n = 4: 1.09 is inside, 1.11 is not.
    for ratio, clipped in ((1.09, False), (1.11, True), (0.91, False), (0.89, True)):
        sign = 1.0 if ratio > 1 else -1.0
        out = evaluate([ratio] * 4, [sign] * 4, torch.tensor([0, 4]), clip_length_power=0.5)
        assert out.clipped_T.tolist() == [clipped] * 4


def test_the_dual_bound_follows_the_length_too():
    # n = 4, dual_clip 3: 3^(1/4) = 1.316. Ratio 1.4 with A = -1 becomes that, without gradient; 1.3 is kept.
    turn = torch.tensor([0, 4])
    out = evaluate([1.4] * 4, [-1.0] * 4, turn, dual_clip=3.0, clip_length_power=1.0)
    assert out.objective.item() == pytest.approx(-(3**0.25))
    assert not out.gradient_T.any() and not out.bias_T.any() and not out.clipped_T.any()
    kept = evaluate([1.3] * 4, [-1.0] * 4, turn, dual_clip=3.0, clip_length_power=1.0)
    assert kept.gradient_T.tolist() == pytest.approx([-1.3 / 4] * 4)


def test_a_ratio_is_compared_as_if_its_logarithm_were_that_of_one_token():
    # w = 1.04, 0.96 and 1.04, with 4, 4 and 1 tokens. n^p is 4, 4 and 1 for p = 1; 2, 2 and 1 for p = 1/2.
    ratio, count = (torch.tensor(x, dtype=torch.float64) for x in ([1.04, 0.96, 1.04], [4.0, 4, 1]))
    for power, expected in (
        (0, [1.04, 0.96, 1.04]),
        (0.5, [1.04**2, 0.96**2, 1.04]),
        (1, [1.04**4, 0.96**4, 1.04]),
    ):
        assert compared(ratio, count, power, torch.float64).tolist() == pytest.approx(expected)


@pytest.mark.parametrize(("power", "most", "least"), [(0.5, 2, 1), (1.0, math.inf, 2)])
def test_of_independent_noise_bounds_of_power_one_half_clip_the_same_share_of_turns_of_any_length(
    power: float, most: float, least: float
) -> None:
    """KL of 5e-4 nats for each token. Expected shares: 0.013 for 6 tokens and 0.016 for 500 with power 1/2,
    0.18 and 0.46 with power 1."""
    kl, turns, bounds = 5e-4, 4000, {"clip_low": 0.07, "clip_high": 0.07}
    generator, shares = torch.Generator().manual_seed(0), []
    for length in (6, 24, 100, 500):
        noise_T = torch.randn(turns * length, generator=generator)
        delta_T = (2 * kl) ** 0.5 * noise_T - kl  # a log-normal ratio with the mean 1
        sign_S = 1.0 - 2 * (torch.arange(turns) % 2)
        columns = delta_T, torch.zeros_like(delta_T), sign_S.repeat_interleave(length)
        offsets, weight_T = torch.arange(turns + 1) * length, torch.full_like(delta_T, 1 / len(delta_T))
        out = surrogate(*columns, weight_T, offsets, clip_length_power=power, **bounds)
        shares.append(float(out.clipped_T.double().mean()))
    assert least < max(shares) / min(shares) < most and min(shares) > 0.008, shares


def test_a_turn_is_clipped_as_a_whole_where_its_own_advantage_decides():
    # A = (1, 1, -0.2): w = 1.3 leaves -0.2 / 3 * 1.3 / 3 for each token; their mean 0.6 leaves nothing.
    old, ratio, c = torch.zeros(3), torch.full((3,), 1.3).log(), torch.full((3,), 1 / 3)
    turn, advantage = torch.tensor([0, 3]), torch.tensor([1.0, 1.0, -0.2])
    by_token = surrogate(ratio, old, advantage, c, turn, clip_low=0.2, clip_high=0.2)
    assert by_token.gradient_T.tolist() == pytest.approx([-0.2 / 3 * 1.3 / 3] * 3)
    whole = decided(advantage, c, turn)
    assert whole.tolist() == pytest.approx([0.6] * 3)
    out = surrogate(ratio, old, whole, c, turn, clip_low=0.2, clip_high=0.2)
    assert out.clipped_T.all() and not out.gradient_T.any() and out.objective.item() == pytest.approx(0.72)
    # Two turns; a token without weight does not count, and may be NaN.
    shared = decided(
        torch.tensor([1.0, math.nan, -1, 3]), torch.tensor([1.0, 0, 1, 3]), torch.tensor([0, 2, 4])
    )
    assert shared.tolist() == [1, 0, 2, 2]


@settings(max_examples=20, deadline=None)
@given(lengths, st.integers(0, 2**31))
def test_the_advantage_of_a_turn_changes_nothing_where_nothing_is_clipped(lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    draws = (torch.randn(int(offsets[-1]), generator=generator, dtype=torch.float64) for _ in range(3))
    delta, advantage, weight = draws
    weight, columns = weight.abs(), (delta, torch.zeros_like(delta))
    outs = [
        surrogate(*columns, a, weight, offsets, clip_low=1, clip_high=math.inf)
        for a in (advantage, decided(advantage, weight, offsets))
    ]
    torch.testing.assert_close(outs[0].objective, outs[1].objective)
    torch.testing.assert_close(outs[0].gradient_T, outs[1].gradient_T)


def test_an_empty_turn_with_bounds_that_follow_the_length_changes_nothing():
    out = evaluate([1.1, 0.9], [1.0, 1.0], torch.tensor([0, 0, 2, 2]), clip_length_power=1.0)
    assert out.ratio_S.tolist() == pytest.approx([1, 0.99**0.5, 1]) and out.objective.isfinite()


def test_two_ranks_that_share_a_turn_clip_it_by_the_ratio_of_all_its_tokens():
    # Token ratios 1.44 and 1: the turn's is 1.2. A = 1 and 2, c = 1/2: the shares of J are 0.6 and 1.2.
    turn, old, half = torch.tensor([0, 1]), torch.zeros(1), torch.full((1,), 0.5)
    ranks = [
        (torch.tensor([ratio]).log(), old, torch.tensor([a]), half) for ratio, a in ((1.44, 1.0), (1.0, 2.0))
    ]
    whole = sum(segment_sums(*columns, turn) for columns in ranks)
    outs = [surrogate(*columns, turn, clip_low=0.2, clip_high=0.21, whole=whole) for columns in ranks]
    assert [out.ratio_S.item() for out in outs] == pytest.approx([1.2, 1.2])
    assert [out.objective.item() for out in outs] == pytest.approx([0.6, 1.2])
    assert [out.gradient_T.item() for out in outs] == pytest.approx([1.2 / 2 * 1.5] * 2)
    # The turn has 2 tokens, not 1: bound sqrt(1.3) = 1.140.
    outs = [
        surrogate(*columns, turn, clip_low=0.2, clip_high=0.3, clip_length_power=1.0, whole=whole)
        for columns in ranks
    ]
    assert [out.objective.item() for out in outs] == pytest.approx([1.3**0.5 / 2, 1.3**0.5])
    assert all(out.clipped_T.item() and out.gradient_T.item() == 0 for out in outs)


def test_tokens_without_weight_may_be_nan():
    nan = math.nan
    # Segment two has no weight at all; token 1 has none and its advantage is NaN, but its ratio counts.
    out = surrogate(
        torch.tensor([0.0, 0.2, nan, 1.0]),
        torch.tensor([0.0, 0.0, 0.0, nan]),
        torch.tensor([1.0, nan, nan, 1.0]),
        torch.tensor([1.0, 0.0, 0.0, 0.0]),
        torch.tensor([0, 2, 4]),
        clip_low=0.2,
        clip_high=0.2,
    )
    w = math.exp(0.1)
    assert out.objective.item() == pytest.approx(w)
    assert out.gradient_T.tolist() == pytest.approx([w / 2, w / 2, 0, 0])
    assert out.bias_T.tolist() == [0, 0, 0, 0]


def test_nan_with_weight_reaches_objective_and_gradient():
    for ratios, advantage in (([math.nan, 1.0], [1.0, 1.0]), ([1.0, 1.0], [math.nan, 1.0])):
        out = evaluate(ratios, advantage, torch.tensor([0, 2]))
        assert out.objective.isnan() and out.gradient_T.isnan().all()


@settings(max_examples=40, deadline=None)
@given(
    lengths,
    st.integers(0, 2**31),
    st.sampled_from([None, 1.5]),
    st.sampled_from(["mean", "sum"]),
    st.sampled_from([(0.2, 0.2), (0.0, 0.0), (0.1, 0.28)]),
    st.sampled_from([0.0, 0.5, 1.0]),
)
def test_gradient_equals_autograd_of_the_definition(lengths, seed, dual_clip, pooling, clip, power):
    generator = torch.Generator().manual_seed(seed)
    offsets = [0]
    for n in lengths:
        offsets.append(offsets[-1] + n)
    draw = [torch.randn(offsets[-1], generator=generator, dtype=torch.float64) for _ in range(4)]
    old, advantage, weight = draw[0], draw[1], draw[2].abs()
    logprob = (old + 0.4 * draw[3]).requires_grad_()
    low, high = clip
    segments, bounds = [slice(*pair) for pair in pairwise(offsets)], (1 - low, 1 + high)
    expected, *_ = defined_loss.clipped(
        logprob, old, advantage, weight, segments, bounds, dual_clip or math.inf, power, pooling
    )
    out = surrogate(
        logprob,
        old,
        advantage,
        weight,
        torch.tensor(offsets),
        clip_low=low,
        clip_high=high,
        dual_clip=dual_clip,
        clip_length_power=power,
        pooling=pooling,
    )
    torch.testing.assert_close(out.objective, expected.detach(), rtol=1e-10, atol=1e-12)
    assert not out.objective.requires_grad
    (gradient,) = torch.autograd.grad(expected, logprob)
    torch.testing.assert_close(out.gradient_T, gradient, rtol=1e-9, atol=1e-11)


@settings(max_examples=20, deadline=None)
@given(lengths, st.integers(0, 2**31))
def test_gradient_plus_bias_is_the_unclipped_gradient(lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    total = int(offsets[-1])
    delta, advantage = (torch.randn(total, generator=generator, dtype=torch.float64) for _ in range(2))
    clipped, free = (
        evaluate(delta.exp(), advantage, offsets, weight=torch.ones_like(delta), clip_low=low, clip_high=high)
        for low, high in ((0.2, 0.2), (1.0, math.inf))
    )
    torch.testing.assert_close(clipped.gradient_T + clipped.bias_T, free.gradient_T)
    assert not free.bias_T.any()
