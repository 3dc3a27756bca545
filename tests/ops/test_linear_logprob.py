import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stppo import ops
from tests.ops.draws import integers, normal, uniform
from tests.ops.memory import Peak

pytestmark = pytest.mark.usefixtures("device")


def draw(rows, columns, width=16, dtype=torch.float32, seed=0):
    hidden = normal(rows, width, seed=seed).to(dtype).requires_grad_()
    weight = normal(columns, width, seed=seed + 1).to(dtype).requires_grad_()
    target = integers(columns, rows, seed=seed + 2).masked_fill(uniform(rows, seed=seed + 3) < 0.1, -100)
    return hidden, weight, target, normal(3, rows, seed=seed + 4)


def weighted(outputs, cotangents):
    return sum((out * c).sum() for out, c in zip(outputs, cotangents, strict=True))


def outputs_of(chunk):
    return chunk.logprob, chunk.entropy, chunk.sum_p_sq


def close(actual, expected, dtype=torch.float32):
    # bfloat16: the chunks' parts of the weight's gradient are summed before they are rounded
    for a, b in zip(actual, expected, strict=True):
        tolerance = 2e-6 if dtype == torch.float32 else 2e-2
        largest = max(b.detach().float().abs().flatten().tolist(), default=0.0)
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * (largest + 1e-3))


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 40),
    st.integers(1, 50),
    st.integers(1, 45),
    st.integers(0, 2**31),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_chunks_change_neither_values_nor_gradients(rows, columns, chunk, seed, dtype):
    hidden, weight, target, cotangents = draw(rows, columns + 3, dtype=dtype, seed=seed)
    target.clamp_(max=columns - 1)
    temperature = 0.5 + uniform(rows, seed=seed + 5)
    settings = {"vocab_size": columns, "temperature": temperature}
    bounds = ops.chunk_bounds(None, rows, chunk)

    def loss(chunk):
        return weighted(outputs_of(chunk), cotangents[:, chunk.first : chunk.last]), torch.zeros(1)

    whole = ops.vocab_logprob(hidden @ weight.t(), target, **settings)
    close(ops.linear_logprob(hidden, weight, target, bounds, **settings), whole, dtype)
    total, *_ = ops.linear_loss(hidden, weight, target, bounds, loss, **settings)
    expected = torch.autograd.grad(weighted(whole, cotangents), (hidden, weight))
    close(torch.autograd.grad(total, (hidden, weight)), expected, dtype)


@pytest.mark.parametrize("bounds", [[0, 60], [0, 17, 18, 60], [0, 0, 30, 60]])
def test_a_loss_over_chunks_equals_the_loss_over_all_rows(bounds):
    hidden, weight, target, cotangents = draw(60, 30)
    seen = []

    def loss(chunk):
        seen.append((chunk.first, chunk.last))
        value = weighted(outputs_of(chunk), cotangents[:, chunk.first : chunk.last])
        return value, torch.tensor([float(chunk.last - chunk.first), 1.0])

    total, record, logprob = ops.linear_loss(hidden, weight, target, bounds, loss)
    assert seen == list(itertools.pairwise(bounds))
    assert record.tolist() == [60.0, len(bounds) - 1]
    outputs = ops.vocab_logprob(hidden @ weight.t(), target)
    torch.testing.assert_close(logprob, outputs[0])
    assert not logprob.requires_grad and not record.requires_grad
    expected = weighted(outputs, cotangents)
    assert total.item() == pytest.approx(expected.item(), rel=1e-5)
    actual = torch.autograd.grad(3 * total, (hidden, weight))
    close(actual, torch.autograd.grad(3 * expected, (hidden, weight)))
    with torch.no_grad():  # scoring needs no gradient
        assert ops.linear_loss(hidden, weight, target, bounds, loss)[0].item() == total.item()


def test_a_frozen_weight_gets_no_gradient_and_changes_no_other():
    hidden, weight, target, cotangents = draw(60, 30)

    def gradient(weight):
        total = ops.linear_loss(hidden, weight, target, [0, 17, 60], loss)[0]
        return torch.autograd.grad(3 * total, hidden)[0]

    def loss(chunk):
        value = weighted(outputs_of(chunk), cotangents[:, chunk.first : chunk.last])
        return value, torch.zeros(1)

    frozen = weight.detach()
    assert torch.equal(gradient(frozen), gradient(weight))
    assert frozen.grad is None and not frozen.requires_grad


@pytest.mark.parametrize("entropy_weight", [0.0, 0.5])
def test_rows_of_a_loss_without_a_gradient_add_nothing_and_are_omitted_on_a_cpu(entropy_weight, device):
    hidden, weight, target, cotangents = draw(60, 30)
    live = torch.arange(60) % 5 == 0
    coefficient = cotangents[0] * live

    def loss(chunk):
        rows = slice(chunk.first, chunk.last)
        value = entropy_weight * chunk.entropy + chunk.logprob * coefficient[rows]
        return value.masked_fill(~live[rows], 0).sum(), torch.zeros(1)

    spoilt = hidden.detach().clone().requires_grad_()
    if device.type == "cpu":  # a row that is not omitted would now be seen in the gradients
        spoilt.data[~live] = float("nan")
    total, *_ = ops.linear_loss(spoilt, weight, target, [0, 30, 60], loss)
    actual = torch.autograd.grad(total, (spoilt, weight))
    logprob, entropy, _ = ops.vocab_logprob(hidden @ weight.t(), target)
    whole = (entropy_weight * entropy * live + logprob * coefficient).sum()
    close(actual, torch.autograd.grad(whole, (hidden, weight)))


def test_a_second_backward_is_refused():
    hidden, weight, target, _ = draw(6, 5)
    total, *_ = ops.linear_loss(hidden, weight, target, [0, 6], lambda c: (c.logprob.sum(), torch.zeros(1)))
    torch.autograd.grad(total, hidden, retain_graph=True)
    with pytest.raises(RuntimeError, match="run it once only"):
        torch.autograd.grad(total, hidden)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_main_gradient_gets_the_gradient_of_the_weight_in_the_forward_and_in_float32(dtype):
    hidden, weight, target, loss = headed(dtype)
    (exact,) = torch.autograd.grad(definition(hidden.double(), weight, target), weight)
    weight.main_grad = torch.ones(weight.shape)
    for _ in range(2):  # micro-batches
        total = ops.linear_loss(hidden, weight, target, [0, 30, 60], loss)[0]
        before = weight.main_grad.clone()
        total.backward()
        assert torch.equal(weight.main_grad, before), "the backward adds nothing"
    assert weight.grad is None
    apart = float((weight.main_grad - 1 - 2 * exact).norm() / (2 * exact).norm())
    assert apart < (1e-6 if dtype == torch.float32 else 1e-2)
    if dtype == torch.bfloat16:
        assert (weight.main_grad != weight.main_grad.bfloat16().float()).any(), "rounded on its way"


def test_a_main_gradient_is_refused_a_factor_that_comes_after_it_was_added():
    hidden, weight, target, loss = headed()
    weight.main_grad = torch.zeros(weight.shape)
    total = ops.linear_loss(hidden, weight, target, [0, 60], loss)[0]
    with pytest.raises(RuntimeError, match="for a cotangent of 1"):
        (3 * total).backward()


def test_two_forwards_into_one_main_gradient_need_a_backward_between_them():
    hidden, weight, target, loss = headed()
    weight.main_grad = torch.zeros(weight.shape)
    with torch.no_grad():  # as a layer that is recomputed, or an evaluation
        ops.linear_loss(hidden, weight, target, [0, 60], loss)
    assert not weight.main_grad.any()
    ops.linear_loss(hidden, weight, target, [0, 60], loss)[0].backward()
    forgotten = ops.linear_loss(hidden, weight, target, [0, 60], loss)[0]
    with pytest.raises(RuntimeError, match="whose backward has not run"):
        ops.linear_loss(hidden, weight, target, [0, 60], loss)
    forgotten.backward()


def headed(dtype=torch.float32):
    hidden, weight, target, cotangents = draw(60, 30, dtype=dtype)

    def loss(chunk):
        return (chunk.logprob * cotangents[0, chunk.first : chunk.last]).sum(), torch.zeros(1)

    return hidden, weight, target, loss


def definition(hidden, weight, target):
    cotangents = draw(60, 30)[3]
    logprob = torch.log_softmax(hidden @ weight.double().t(), 1).gather(1, target.clamp(min=0)[:, None])
    return (logprob[:, 0].masked_fill(target < 0, 0) * cotangents[0]).sum()


def test_float32_logits_of_bfloat16_factors_are_not_rounded():
    hidden, weight, target, cotangents = draw(60, 300, width=64, dtype=torch.bfloat16)
    exact = ops.vocab_logprob((hidden.double() @ weight.double().t()).float(), target)

    def loss(chunk):
        return weighted(outputs_of(chunk), cotangents[:, chunk.first : chunk.last]), torch.zeros(1)

    def errors(outputs):
        return [float((a - b).abs().max()) for a, b in zip(outputs, exact, strict=True)]

    bounds = [0, 17, 60]
    precise = ops.linear_logprob(hidden, weight, target, bounds, float32_logits=True)
    assert max(errors(precise)) < 1e-4 < 1e-3 < errors(ops.linear_logprob(hidden, weight, target, bounds))[0]
    total, _, logprob = ops.linear_loss(hidden, weight, target, bounds, loss, float32_logits=True)
    assert torch.equal(logprob, precise[0]), "the first importance ratio is exactly 1"
    expected = torch.autograd.grad(weighted(exact, cotangents), (hidden, weight))
    close(torch.autograd.grad(total, (hidden, weight)), expected, torch.bfloat16)


@pytest.mark.parametrize("live", [1.0, 0.88, 0.5, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_beyond_the_gradients_is_one_chunk_of_logits(implementation, dtype, live):
    if implementation == "torch":
        pytest.skip("the fallback makes float32 copies; the bound is the extension's")
    rows, columns, width, chunk = 2048, 4096, 32, 256
    hidden, weight, target, cotangents = draw(rows, columns, width, dtype)
    cotangents = cotangents * (uniform(rows) < live)
    gradients = dtype.itemsize * (hidden.numel() + weight.numel())
    in_float32 = 0 if dtype == torch.float32 else 4 * weight.numel()  # weight's gradient, to the backward
    statistics = 4 * rows * (5 + 6 + 3 + 3)  # of the shards, merged, outputs, gradients of outputs
    a_chunk = dtype.itemsize * chunk * columns
    limit = 1.2 * a_chunk + gradients + in_float32 + statistics

    def loss(chunk):
        return weighted(outputs_of(chunk), cotangents[:, chunk.first : chunk.last]), torch.zeros(1)

    bounds = ops.chunk_bounds(None, rows, chunk)
    with Peak() as peak:
        ops.linear_logprob(hidden, weight, target, bounds)
    assert a_chunk < peak.peak <= 1.2 * a_chunk + statistics
    with Peak() as peak:
        total, *_ = ops.linear_loss(hidden, weight, target, bounds, loss)
        torch.autograd.grad(total, (hidden, weight))
    assert a_chunk < peak.peak <= limit
    weight.main_grad = torch.zeros(weight.shape)
    with Peak() as peak:
        ops.linear_loss(hidden, weight, target, bounds, loss)[0].backward()
    assert a_chunk < peak.peak <= 1.2 * a_chunk + statistics + 2 * dtype.itemsize * hidden.numel()


def test_the_backward_of_log_probs_keeps_only_their_statistics(implementation):
    if implementation == "torch":
        pytest.skip("the fallback makes float32 copies; the bound is the extension's")
    rows, columns = 512, 4096
    logits = torch.randn(rows, columns).requires_grad_() * 1  # not a leaf: nothing keeps its gradient
    with Peak() as peak:
        outputs = ops.vocab_logprob(logits, torch.zeros(rows, dtype=torch.int64), overwrite=True)
        torch.autograd.grad(weighted(outputs, torch.randn(3, rows)), logits)
    assert peak.peak <= 4 * rows * 32  # a few numbers per row, none per logit


def test_chunks_do_not_split_segments():
    offsets = torch.tensor([0, 3, 5, 9])
    assert ops.chunk_bounds(offsets, 9, 5) == [0, 5, 9]
    assert ops.chunk_bounds(offsets, 9, 2) == [0, 3, 5, 9]  # a longer segment is a longer chunk
    assert ops.chunk_bounds(offsets, 9, 9) == [0, 9]
    assert ops.chunk_bounds(None, 10, 4) == [0, 4, 8, 10]
    assert ops.chunk_bounds(None, 0, 4) == [0, 0]
    assert ops.chunk_bounds(torch.tensor([0, 0, 4, 4, 8, 8]), 8, 4) == [0, 4, 8]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(4, 3, dtype=torch.float64)}, "hidden has dtype float64"),
        ({"weight": torch.zeros(5, 2)}, r"weight has shape \[5, 2\]; give \[any, 3\]"),
        ({"target": torch.zeros(3, dtype=torch.int64)}, r"target has shape \[3\]; give \[4\]"),
        ({"target": torch.full((4,), 5)}, r"target\[0\]=5 lies outside"),
        ({"bounds": [0, 3, 2, 4]}, r"bounds=\[0, 3, 2, 4\]... must rise from 0 to the 4 rows"),
    ],
)
def test_a_wrong_argument_is_named(change, message, device, raises):
    if not raises and "lies outside" in message:
        pytest.skip(
            "the extension on a GPU reads no target back: NaN instead, tests/ops/test_vocab_hazards.py"
        )
    change = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in change.items()}
    arguments = {"hidden": torch.zeros(4, 3), "weight": torch.zeros(5, 3), "bounds": [0, 4]}
    arguments |= {"target": torch.zeros(4, dtype=torch.int64)} | change
    with pytest.raises(ValueError, match=message):
        ops.linear_logprob(**arguments)
