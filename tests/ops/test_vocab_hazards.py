"""Edge cases of vocab_logprob: numbers, shapes and memory."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stppo import ops
from megatron_stppo.ops.shard import Shard
from megatron_stppo.ops.vocab_logprob import local_statistics, merge_shards, write_gradient
from tests.ops.draws import fallback, integers, logprob_and_gradient, normal, rows, unaligned, uniform

pytestmark = pytest.mark.usefixtures("device")
NAN, INF = math.nan, math.inf
DTYPES = [torch.float32, torch.bfloat16]
LOWEST = torch.finfo(torch.bfloat16).min  # the value that models write for a forbidden token


def close(actual, expected, dtype=torch.float32):
    """Assert that outputs agree within float32's error, and bfloat16 gradients within one rounding."""
    for a, b in zip(actual[:3], expected[:3], strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-5, atol=5e-6)
    relative = 1e-4 if dtype == torch.float32 else 8e-3
    torch.testing.assert_close(actual[3].double(), expected[3].double(), rtol=relative, atol=2e-6)


def exact(logits, target, temperature=1.0):
    """Return outputs of float64 log_softmax and the gradient by autograd, for output gradients 1, 2, 3."""
    x = logits.detach().double().requires_grad_()
    log_p = (x / torch.as_tensor(temperature).double().reshape(-1, 1)).log_softmax(-1)
    outputs = (
        log_p.gather(1, target[:, None])[:, 0],
        -(log_p.exp() * log_p).sum(1),
        log_p.exp().square().sum(1),
    )
    sum((i + 1) * out.sum() for i, out in enumerate(outputs)).backward()
    return *outputs, x.grad


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 7, 127, 129, 1003, 5000, 10_001])
def test_a_vocabulary_may_have_any_size(columns, dtype):
    logits, target = rows(3, columns)
    logits = logits.to(dtype)
    close(logprob_and_gradient(logits, target), exact(logits, target), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by", [1, 3, 5])
def test_logits_may_start_at_any_element(by, dtype):
    for columns in (1001, 1024):
        logits, target = rows(4, columns)
        aligned = logprob_and_gradient(logits.to(dtype), target)
        close(logprob_and_gradient(unaligned(logits.to(dtype), by), unaligned(target)), aligned, dtype)


@pytest.mark.parametrize("by", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_is_written_over_the_logits_and_nowhere_else(by, dtype):
    logits, target = rows(5, 1003)
    logits = logits.to(dtype)
    expected = logprob_and_gradient(logits, target)[3]
    room = torch.full((5 * 1003 + 16,), 7.0, dtype=dtype)
    inside = room[by : by + 5 * 1003].view(5, 1003).copy_(logits).requires_grad_()
    sum(
        (i + 1.0) * out.sum() for i, out in enumerate(ops.vocab_logprob(inside, target, overwrite=True))
    ).backward()
    assert inside.grad.equal(expected) and room[by : by + 5 * 1003].view(5, 1003).equal(expected)
    assert room[:by].eq(7).all() and room[by + 5 * 1003 :].eq(7).all()


@pytest.mark.parametrize("level", [1e4, -1e4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_logits_of_any_size_are_uniform(level, dtype):
    columns = 3001
    logits = torch.full((2, columns), level, dtype=dtype)
    logprob, entropy, sum_p_sq, gradient = logprob_and_gradient(logits, torch.tensor([0, columns - 1]))
    assert logprob.tolist() == pytest.approx([-math.log(columns)] * 2, rel=1e-6)
    assert entropy.tolist() == pytest.approx([math.log(columns)] * 2, rel=1e-6)
    assert sum_p_sq.tolist() == pytest.approx([1 / columns] * 2, rel=1e-5)
    assert gradient[0, 0].item() == pytest.approx(1 - 1 / columns, rel=4e-3)
    assert gradient[0, 5].item() == pytest.approx(-1 / columns, rel=8e-3)


@pytest.mark.parametrize("forbidden", [-INF, LOWEST])
@pytest.mark.parametrize("dtype", DTYPES)
def test_forbidden_tokens_before_and_after_allowed_ones_are_ignored(forbidden, dtype):
    columns, allowed = 6000, slice(2500, 3500)  # many whole packs of forbidden tokens on either side
    few, target = rows(3, 1000)
    logits = torch.full((3, columns), forbidden, dtype=dtype)
    logits[:, allowed] = few.to(dtype)
    out = logprob_and_gradient(logits, target + 2500)
    close((*out[:3], out[3][:, allowed]), logprob_and_gradient(few.to(dtype), target), dtype)
    assert not out[3][:, :2500].any() and not out[3][:, 3500:].any()


@pytest.mark.parametrize("weight", [3.0, 1e3])
def test_a_forbidden_tokens_gradient_is_0_however_much_the_entropy_weighs(weight):
    logits = torch.tensor([[1.0, 2.0, -INF, 0.0]]).requires_grad_()
    (weight * ops.vocab_logprob(logits, torch.tensor([0]))[1].sum()).backward()
    kept = logits.detach()[:, [0, 1, 3]].requires_grad_()
    (weight * ops.vocab_logprob(kept, torch.tensor([0]))[1].sum()).backward()
    assert logits.grad[0, 2] == 0
    torch.testing.assert_close(logits.grad[:, [0, 1, 3]], kept.grad, rtol=1e-5, atol=1e-6 * weight)


def test_another_use_of_overwritten_logits_is_an_error():
    leaf, target = rows(3, 50)
    logits = leaf.requires_grad_() * 1
    squares = logits.square().sum()  # its backward reads the logits
    logprob, _, _ = ops.vocab_logprob(logits, target, overwrite=True)
    logprob.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()


def test_a_row_without_a_finite_logit_is_nan_and_its_neighbours_are_not():
    logits, target = rows(5, 300)
    expected = logprob_and_gradient(logits, target)
    logits[1], logits[3] = -INF, INF
    spoiled = logprob_and_gradient(logits, target)
    for a, b in zip(spoiled, expected, strict=True):
        assert a[[1, 3]].isnan().all() and a[[0, 2, 4]].equal(b[[0, 2, 4]])


@pytest.mark.parametrize("place", [0, 150, 299])
def test_one_nan_anywhere_makes_its_row_nan(place):
    logits, target = rows(3, 300)
    logits[1, place] = NAN
    logprob, entropy, sum_p_sq, gradient = logprob_and_gradient(logits, target)
    for out in (logprob, entropy, sum_p_sq, gradient[:, 7]):
        assert out.isnan().tolist() == [False, True, False]


def sharded(logits, target, cuts, **settings):
    """Return (three outputs, gradient) from shards that end at `cuts`. The last may be padding only."""
    shards, statistics = [], []
    for start, stop in zip([0, *cuts], [*cuts, logits.shape[1]], strict=True):
        valid = max(0, min(stop, settings["valid"]) - start)
        shards.append(Shard(target, settings["temperature"], start, valid))
        statistics.append(local_statistics(logits[:, start:stop].contiguous(), shards[-1]))
    merged = merge_shards(torch.stack(statistics), shards[0])
    cotangents = [torch.full((len(logits),), i + 1.0) for i in range(3)]
    parts = []
    for shard, start, stop in zip(shards, [0, *cuts], [*cuts, logits.shape[1]], strict=True):
        part = logits[:, start:stop].contiguous()
        parts.append(write_gradient(part, shard, merged, cotangents, torch.empty_like(part)))
    return *merged[:3], torch.cat(parts, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cuts", [[335, 670], [1, 1002], [1003], [400, 1003, 1004]])
def test_shards_of_any_width_equal_the_whole(cuts, dtype):
    logits, target = rows(6, 1005)
    logits, target = logits.to(dtype), target % 1003
    logits[:, 1003:] = NAN  # padding
    logits[2, : min(cuts[0], 900)], target[2] = -INF, 1002  # a shard of -inf
    target[4] = -100
    temperature = 0.5 + uniform(6)
    whole = logprob_and_gradient(logits, target, vocab_size=1003, temperature=temperature)
    close(sharded(logits, target, cuts, valid=1003, temperature=temperature), whole, dtype)


def test_a_target_outside_every_shard_is_an_error_or_a_nan_row(raises):
    logits, target = rows(3, 300)
    for wrong in (300, 2**40, -1, -101):
        target[1] = wrong
        if raises:
            with pytest.raises(ValueError, match=rf"target\[1\]={wrong} lies outside every shard"):
                ops.vocab_logprob(logits, target)
        else:
            assert ops.vocab_logprob(logits, target)[0].isnan().tolist() == [False, True, False]


@pytest.mark.row_alone
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_row_has_its_own_temperature(dtype):
    logits, target = rows(7, 1003)
    logits, temperature = logits.to(dtype), torch.tensor([0.1, 0.5, 1.0, 1.0, 1.5, 3.0, 100.0])
    together = logprob_and_gradient(logits, target, temperature=temperature)
    close(together, exact(logits, target, temperature), dtype)
    for row in range(7):
        alone = logprob_and_gradient(
            logits[row : row + 1], target[row : row + 1], temperature=float(temperature[row])
        )
        assert all(a.equal(b[row : row + 1]) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("columns", [301, 1024])
def test_a_bfloat16_gradient_is_the_float32_one_rounded_to_nearest(columns):
    logits, target = rows(20, columns)
    logits = logits.bfloat16()
    shard = Shard(target, 0.5 + uniform(20), 0, columns)
    merged = merge_shards(local_statistics(logits, shard)[None], shard)
    cotangents = [normal(20, seed=i) for i in range(3)]
    narrow, wide = (write_gradient(x, shard, merged, cotangents, x.clone()) for x in (logits, logits.float()))
    # bfloat16 is the upper half of float32; the CPU kernel rounds a tie away from 0, the others to even
    away = (wide.view(torch.int32) + 0x8000).bitwise_right_shift(16).to(torch.int16).view(torch.bfloat16)
    assert narrow.dtype == torch.bfloat16 and (narrow.eq(wide.bfloat16()) | narrow.eq(away)).all()
    # without cotangents of entropy and sum p^2 the CPU kernel's exponentials have an error of 1.1e-4
    cotangents = [cotangents[0], None, None]
    narrow, wide = (write_gradient(x, shard, merged, cotangents, x.clone()) for x in (logits, logits.float()))
    torch.testing.assert_close(narrow.float(), wide, rtol=2**-8 + 1.2e-4, atol=1e-37)


def test_rows_beyond_2_to_the_31_elements_are_addressed_correctly(device):
    # only the first 48 columns of each row are read, and memory that is not touched is not allocated
    count, columns = 2080, 1 << 20
    logits = torch.empty(count, columns, dtype=torch.bfloat16)
    assert logits.numel() > 2**31
    few, target = rows(3, 48)
    where = torch.tensor([0, 2047, 2079])
    everywhere = torch.full((count,), -100)
    everywhere[where] = target
    logits[where, :48] = few.bfloat16()
    expected = logprob_and_gradient(few.bfloat16(), target)
    if device.type == "cpu":  # the gradient would touch 4.3 GB
        out = ops.vocab_logprob(logits, everywhere, vocab_size=48)
    else:
        logits.requires_grad_()
        out = ops.vocab_logprob(logits, everywhere, vocab_size=48, overwrite=True)
        sum((i + 1.0) * x.sum() for i, x in enumerate(out)).backward()
        close((*(x[where] for x in out), logits[where, :48].detach()), expected, torch.bfloat16)
    for a, b in zip(out, expected[:3], strict=True):
        torch.testing.assert_close(a[where], b, rtol=1e-5, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(0, 6),
    columns=st.one_of(st.integers(1, 70), st.sampled_from([255, 256, 257, 1024, 4096, 4099])),
    padding=st.integers(0, 9),
    scale=st.sampled_from([0.01, 3.0, 100.0]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
def test_outputs_and_gradient_equal_the_fallbacks(count, columns, padding, scale, dtype, seed):
    logits = normal(count, columns + padding, seed=seed, scale=scale).to(dtype)
    target = integers(columns, count, seed=seed)
    target[uniform(count, seed=seed) < 0.2] = -100
    settings = {"vocab_size": columns, "temperature": 0.5 + uniform(count, seed=seed)}
    mine = logprob_and_gradient(logits, target, **settings)
    with fallback():
        expected = logprob_and_gradient(logits, target, **settings)
    close(mine, expected, dtype)
