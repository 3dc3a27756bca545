import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stppo import ops
from megatron_stppo.algorithm import vocabulary
from tests.ops.draws import normal, rows, uniform

pytestmark = pytest.mark.usefixtures("device")

NAN, INF = math.nan, math.inf


def reference(logits, target, temperature=1.0, vocab_size=None):
    """Return outputs of float64 log_softmax over the vocabulary without padding. Ignored rows give 0."""
    x = logits.double()[:, :vocab_size] / (torch.as_tensor(temperature).double().reshape(-1, 1))
    keep = target != -100
    log_p = x[keep].log_softmax(-1)
    p = log_p.exp()
    rows = log_p.gather(1, target[keep, None]).squeeze(1), -(p * log_p).sum(1), p.square().sum(1)
    return [torch.zeros(len(x), dtype=torch.float64).masked_scatter(keep, row) for row in rows]


def gradients(outputs, logits, cotangents):
    total = sum((c * out).sum() for c, out in zip(cotangents, outputs, strict=True))
    return torch.autograd.grad(total, logits)[0]


def test_two_logits_match_a_hand_calculation():
    # p = (1/4, 3/4): log p_0 = -ln 4, entropy = ln 4 - 3/4 ln 3, sum p^2 = 10/16
    logits = torch.tensor([[0.0, math.log(3)]], requires_grad=True)
    logprob, entropy, sum_p_sq = ops.vocab_logprob(logits, torch.tensor([0]))
    assert logprob.item() == pytest.approx(-math.log(4))
    assert entropy.item() == pytest.approx(math.log(4) - 0.75 * math.log(3))
    assert sum_p_sq.item() == pytest.approx(10 / 16)
    # d logprob = (1 - 1/4, -3/4), whose squared length is 1 - 2 p_0 + sum p^2 = 18/16
    logprob.sum().backward()
    assert logits.grad.tolist()[0] == pytest.approx([0.75, -0.75])
    assert logits.grad.square().sum().item() == pytest.approx(1 - 2 / 4 + 10 / 16)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 9),
    st.integers(1, 70),
    st.integers(0, 2**31),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 5),
)
def test_values_and_gradients_equal_float64_log_softmax(count, columns, seed, dtype, padding):
    logits, target = rows(count, columns, seed)
    logits = torch.nn.functional.pad(logits, (0, padding), value=NAN).to(dtype).requires_grad_()
    target = target.masked_fill(uniform(count, seed=seed) < 0.2, -100)
    temperature = 0.5 + uniform(count, seed=seed + 1)
    cotangents = normal(3, count, seed=seed).unbind()
    outputs = ops.vocab_logprob(logits, target, vocab_size=columns, temperature=temperature)
    expected = reference(logits, target, temperature, columns)
    for output, value in zip(outputs, expected, strict=True):
        assert output.dtype == torch.float32
        torch.testing.assert_close(output.double(), value, rtol=1e-5, atol=2e-6)
    # bfloat16 rounds the gradient once, when it is written
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 8e-3, "atol": 1e-5}
    actual, exact = gradients(outputs, logits, cotangents), gradients(expected, logits, cotangents)
    torch.testing.assert_close(actual[:, :columns], exact[:, :columns], **tolerance)
    assert not actual[:, columns:].any()


def test_each_outputs_gradient_equals_the_one_that_numerical_differences_confirm():
    # gradcheck compares the float64 reference with numerical differences; the op is compared with the
    # reference.
    logits, target = rows(4, 7)
    logits = logits.double().requires_grad_()

    def outputs(x):
        return tuple(reference(x, target, 0.7))

    assert torch.autograd.gradcheck(outputs, (logits,))
    single = logits.detach().float().requires_grad_()
    for which in range(3):
        cotangents = [torch.full((4,), float(which == i)) for i in range(3)]
        exact = gradients(outputs(logits), logits, cotangents)
        actual = gradients(ops.vocab_logprob(single, target, temperature=0.7), single, cotangents)
        torch.testing.assert_close(actual.double(), exact, rtol=1e-5, atol=1e-6)


def test_entropy_gradient_is_not_corrupted_by_the_logprob_gradient():
    # Backward passes one at a time, in either order, equal one joint pass: nothing is overwritten.
    logits, target = rows(5, 11)
    logits.requires_grad_()
    before = logits.detach().clone()
    logprob, entropy, _ = ops.vocab_logprob(logits, target)
    together = torch.autograd.grad(logprob.sum() + entropy.sum(), logits, retain_graph=True)[0]
    first = torch.autograd.grad(entropy.sum(), logits, retain_graph=True)[0]
    second = torch.autograd.grad(logprob.sum(), logits)[0]
    torch.testing.assert_close(first + second, together)
    assert logits.detach().equal(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_rows_equal_the_reference_wherever_their_largest_logits_are(dtype):
    logits, _ = rows(4, 6001)  # an odd number: two bfloat16 make a word, and the last column is alone
    step = torch.arange(6001) // 1500
    logits += torch.stack([0 * step, 7 * step, 30 * step, -30 * step])
    logits[1:3, :2500] = -INF
    logits = logits.to(dtype).requires_grad_()
    target, ones = torch.tensor([0, 4000, 6000, 6000]), [torch.ones(4)] * 3
    outputs = ops.vocab_logprob(logits, target)
    expected = reference(logits.clamp(min=-1e30), target)  # its entropy would be NaN, as 0 times -inf
    for output, value in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output.double(), value, rtol=1e-5, atol=3e-6)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 8e-3, "atol": 1e-5}
    exact = gradients(expected, logits, ones)
    torch.testing.assert_close(gradients(outputs, logits, ones), exact, **tolerance)


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, -1])
def test_a_nan_cotangent_gives_a_nan_gradient_in_bfloat16_whatever_its_bits(bits):
    logits = torch.zeros(1, 3, dtype=torch.bfloat16, requires_grad=True)
    logprob = ops.vocab_logprob(logits, torch.tensor([1]))[0]
    cotangent = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    assert torch.autograd.grad(logprob, logits, cotangent)[0].isnan().all()


@pytest.mark.parametrize("level", [1e4, -1e4])
def test_large_common_offset_changes_nothing(level):
    logits, target = rows(6, 50)
    logits = logits.mul(64).round().div(64)  # so that adding 1e4 is exact
    shifted = (logits + level).requires_grad_()
    plain = logits.clone().requires_grad_()
    ones = [torch.ones(6)] * 3
    moved, still = (ops.vocab_logprob(x, target) for x in (shifted, plain))
    for a, b in zip(moved, still, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    torch.testing.assert_close(gradients(moved, shifted, ones), gradients(still, plain, ones), rtol=0, atol=0)


def test_certain_target_keeps_its_small_gradient_in_bfloat16():
    # p_0 = 1 - 3.35e-4, which bfloat16 would round to 1 and 1 - p_0 to 0.
    logits = torch.tensor([[8.0, 0.0]], dtype=torch.bfloat16, requires_grad=True)
    ops.vocab_logprob(logits, torch.tensor([0]))[0].sum().backward()
    small = 1 / (1 + math.exp(8))
    assert logits.grad.tolist()[0] == pytest.approx([small, -small], rel=4e-3)


def test_forbidden_tokens_of_minus_infinity_get_probability_and_gradient_0():
    logits = torch.tensor([[1.0, -INF, 2.0, -INF]], requires_grad=True)
    outputs = ops.vocab_logprob(logits, torch.tensor([2]))
    expected = ops.vocab_logprob(torch.tensor([[1.0, 2.0]]), torch.tensor([1]))
    for output, value in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, value)
    gradient = gradients(outputs, logits, [torch.ones(1)] * 3)
    assert gradient.isfinite().all() and not gradient[0, [1, 3]].any()
    assert ops.vocab_logprob(logits, torch.tensor([1]))[0].item() == -INF


def test_padding_columns_never_make_a_logprob_positive():
    logits = torch.tensor([[0.0, 0.0, 50.0, NAN]], requires_grad=True)
    logprob, entropy, _ = ops.vocab_logprob(logits, torch.tensor([1]), vocab_size=2)
    assert logprob.item() == pytest.approx(-math.log(2)) and entropy.item() == pytest.approx(math.log(2))
    (logprob + entropy).sum().backward()
    assert logits.grad.tolist()[0] == pytest.approx([-0.5, 0.5, 0.0, 0.0])


def test_ignored_rows_give_0_and_no_gradient_whatever_they_contain():
    logits = torch.tensor([[NAN, INF], [0.0, 0.0], [-INF, -INF]], requires_grad=True)
    outputs = ops.vocab_logprob(logits, torch.tensor([-100, 0, -100]))
    assert [row.tolist()[::2] for row in outputs] == [[0.0, 0.0]] * 3
    gradient = gradients(outputs, logits, [torch.tensor([1.0, 1.0, NAN])] * 3)
    assert gradient.tolist() == [[0.0, 0.0], [0.5, -0.5], [0.0, 0.0]]


def test_backward_runs_without_rows_or_valid_rows():
    for logits, target in (
        (torch.randn(3, 5), torch.full((3,), -100)),
        (torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64)),
    ):
        logits.requires_grad_()
        sum(out.sum() for out in ops.vocab_logprob(logits, target)).backward()
        assert logits.grad.shape == logits.shape and not logits.grad.any()


def test_non_finite_logits_are_reported_as_nan_not_as_a_bad_target():
    logprob, entropy, _ = ops.vocab_logprob(torch.tensor([[NAN, 0.0], [0.0, 0.0]]), torch.tensor([0, 0]))
    assert logprob.isnan().tolist() == entropy.isnan().tolist() == [True, False]


@pytest.mark.row_alone
def test_row_chunks_do_not_change_a_bit(monkeypatch):
    logits, target = rows(40, 97)
    whole = ops.vocab_logprob(logits.requires_grad_(), target)
    expected = gradients(whole, logits, [torch.ones(40)] * 3)
    monkeypatch.setattr(vocabulary, "CHUNK", 300)  # three rows at a time
    pieces = ops.vocab_logprob(logits, target)
    assert all(a.equal(b) for a, b in zip(whole, pieces, strict=True))
    assert gradients(pieces, logits, [torch.ones(40)] * 3).equal(expected)


@pytest.mark.row_alone
def test_a_token_gets_the_same_bits_in_any_microbatch():
    logits, target = rows(33, 1001)
    together = ops.vocab_logprob(logits, target)
    for part in (slice(0, 1), slice(5, 12), slice(32, 33)):
        alone = ops.vocab_logprob(logits[part].clone(), target[part])
        assert all(a[part].equal(b) for a, b in zip(together, alone, strict=True))


def test_unused_outputs_cost_nothing_and_nothing_is_saved_under_no_grad():
    logits, target = rows(4, 9)
    logits.requires_grad_()
    with torch.no_grad():
        assert not any(out.requires_grad for out in ops.vocab_logprob(logits, target))
    _, entropy, _ = ops.vocab_logprob(logits, target)
    exact = reference(logits, target)[1]
    torch.testing.assert_close(
        torch.autograd.grad(entropy.sum(), logits)[0],
        torch.autograd.grad(exact.sum(), logits)[0],
        rtol=1e-5,
        atol=1e-6,
    )
