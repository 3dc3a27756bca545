import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stppo import ops
from megatron_stppo.evidence.bench import defined_loss
from tests.ops.draws import offsets_of, three, uniform

pytestmark = pytest.mark.usefixtures("device")


def logs(*ratios):
    return torch.tensor(ratios).log()


def test_token_level_surrogate_matches_a_hand_calculation():
    # Ratios 1.5 and 0.9, A = 1: (1.2 + 0.9) / 2. One of two clipped. g = (0, 0.45), b = (0.75, 0).
    logprob = logs(1.5, 0.9).requires_grad_()
    out = ops.clipped_surrogate(logprob, torch.zeros(2), torch.ones(2))
    assert out.objective.item() == pytest.approx(1.05)
    assert out.clip_fraction.item() == 0.5
    assert out.ratio.tolist() == pytest.approx([1.5, 0.9])
    assert out.bias_sq.item() == pytest.approx(0.75**2)
    assert out.grad_sq.item() == pytest.approx(0.45**2)
    # delta = ln 1.5, ln 0.9. k1 = -mean delta; k3 = mean(w - 1 - delta) = (0.5 - 0.1)/2 - mean delta
    mean_delta = math.log(1.5 * 0.9) / 2
    assert out.kl_k1.item() == pytest.approx(-mean_delta)
    assert out.kl_k3.item() == pytest.approx(0.2 - mean_delta)
    (3 * out.objective).backward()
    assert logprob.grad.tolist() == pytest.approx([0, 3 * 0.45])


def test_only_the_objective_carries_a_gradient_and_only_to_logprob():
    logprob, old, advantage = (torch.ones(2, requires_grad=True) for _ in range(3))
    out = ops.clipped_surrogate(logprob, old, advantage)
    tensors = {name: value for name, value in out._asdict().items() if value is not None}
    assert [name for name, value in tensors.items() if value.requires_grad] == ["objective"]
    out.objective.backward()
    assert old.grad is None and advantage.grad is None


@pytest.mark.parametrize("factor", [1.0, -1.0, 0.5])
def test_every_backward_gives_the_factor_times_the_gradient_and_changes_no_output(factor):
    new, old, advantage = three(50)
    logprob = new.requires_grad_()
    out = ops.clipped_surrogate(logprob, old, advantage, offsets_of(20, 30))
    expected = factor * out.grad_T
    for times in (1, 2):  # the second is added to the first
        (factor * out.objective).backward(retain_graph=True)
        assert logprob.grad.equal(times * expected)
        assert (factor * out.grad_T).equal(expected)


def test_clip_fraction_counts_action_tokens_not_turns():
    # Turn one: 3 tokens at ratio 1.5, clipped. Turn two: 1 token at ratio 1.
    out = ops.clipped_surrogate(
        logs(1.5, 1.5, 1.5, 1), torch.zeros(4), torch.ones(4), torch.tensor([0, 3, 4], dtype=torch.int32)
    )
    assert out.clip_fraction.item() == 0.75
    assert (out.clipped.item(), out.tokens.item()) == (3, 4)


def test_weight_is_a_number_or_one_per_token():
    given = (logs(1.1, 0.9), torch.zeros(2), torch.tensor([1.0, 2.0]))
    for weight in (0.5, torch.full((2,), 0.5), None):
        assert ops.clipped_surrogate(*given, weight=weight).objective.item() == pytest.approx(1.45)


def test_microbatches_add_up_to_the_whole():
    new, old, advantage = three(12)
    offsets = torch.tensor([0, 5, 5, 8, 12])
    whole = ops.clipped_surrogate(new, old, advantage, offsets, weight=1 / 12)
    parts = [
        ops.clipped_surrogate(new[cut], old[cut], advantage[cut], part, weight=1 / 12)
        for cut, part in ((slice(0, 5), torch.tensor([0, 5, 5])), (slice(5, 12), torch.tensor([0, 3, 7])))
    ]
    for name in ("objective", "bias_sq", "grad_sq", "clipped", "tokens"):
        torch.testing.assert_close(sum(getattr(part, name) for part in parts), getattr(whole, name))
    assert torch.cat([part.grad_T for part in parts]).equal(whole.grad_T)


def test_masked_tokens_may_be_nan_and_are_not_counted():
    logprob = torch.tensor([math.log(1.5), math.nan], requires_grad=True)
    out = ops.clipped_surrogate(
        logprob, torch.tensor([0.0, math.inf]), torch.tensor([1.0, math.nan]), weight=torch.tensor([1.0, 0.0])
    )
    assert out.objective.item() == pytest.approx(1.2)
    assert (out.clip_fraction.item(), out.tokens.item()) == (1.0, 1.0)
    assert out.kl_k1.isfinite() and out.kl_k3.isfinite() and out.bias_sq.isfinite()
    out.objective.backward()
    assert logprob.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("tokens", [2048, 32_768, 40_000])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_bound_of_1e_4_or_less_acts_within_1_percent(tokens, sign):
    # A turn of one token stands before the long one, whose bound is (1 + sign * 0.2)^(1/n).
    bound = math.log1p(sign * 0.2) / tokens
    old = -5 * uniform(tokens + 1, seed=1)
    for times, clipped in ((0.99, False), (1.01, True)):
        new = old + times * bound
        advantage = torch.full_like(old, sign)
        out = ops.clipped_surrogate(
            *(new, old, advantage, offsets_of(1, tokens)), clip_length_power=1.0, with_bias=True
        )
        assert out.clipped.item() == (tokens if clipped else 0)
        assert (out.grad_T[1:] == 0).all().item() is clipped
        assert (out.bias_T[1:] == 0).all().item() is not clipped
        assert out.ratio[1].item() == pytest.approx(math.exp((new - old)[1:].double().mean()), abs=1e-7)


@pytest.mark.parametrize("power", [0.5, 1.0])
def test_turns_of_one_token_have_the_bounds_of_tokens(power):
    given, settings = three(3000), {"weight": 0.5, "dual_clip": 1.5, "with_bias": True}
    by_token = ops.clipped_surrogate(*given, **settings)
    alone = ops.clipped_surrogate(*given, offsets_of(*[1] * 3000), clip_length_power=power, **settings)
    assert 0 < by_token.clipped < 3000
    assert all(x.equal(y) for x, y in zip(by_token, alone, strict=True))
    given = [torch.cat([x, x[:2]]) for x in given]  # with a turn of two, which is processed otherwise
    among = ops.clipped_surrogate(*given, offsets_of(*[1] * 3000, 2), clip_length_power=power, **settings)
    assert among.ratio[:3000].equal(alone.ratio)
    assert among.grad_T[:3000].equal(alone.grad_T) and among.bias_T[:3000].equal(alone.bias_T)


def test_backward_runs_without_tokens_or_segments():
    for offsets in (None, torch.tensor([0]), torch.tensor([0, 0, 0])):
        logprob = torch.zeros(0, requires_grad=True)
        out = ops.clipped_surrogate(logprob, torch.zeros(0), torch.zeros(0), offsets)
        assert out.objective.item() == 0 and out.clip_fraction.item() == 0
        out.objective.backward()
        assert len(logprob.grad) == 0


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(0, 6), max_size=6),
    st.integers(0, 2**31),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from([None, 1.5]),
)
def test_backward_equals_float64_autograd_of_the_definition(lengths, seed, power, dual_clip):
    offsets = offsets_of(*lengths)
    new, old, advantage = three(sum(lengths), seed=seed, scale=0.5)
    logprob, exact = new.clone().requires_grad_(), new.double().requires_grad_()
    settings = {"dual_clip": dual_clip, "clip_length_power": power}
    out = ops.clipped_surrogate(logprob, old, advantage, offsets, weight=0.25, **settings)
    out.objective.backward()
    weight = torch.full_like(exact, 0.25)
    segments = [slice(*pair) for pair in pairwise(offsets.tolist())]
    tokens = (exact, old.double(), advantage.double(), weight)
    expected, *_ = defined_loss.clipped(*tokens, segments, dual=dual_clip or math.inf, power=power)
    expected.backward()
    torch.testing.assert_close(out.objective.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logprob.grad.double(), exact.grad, rtol=1e-5, atol=1e-6)
