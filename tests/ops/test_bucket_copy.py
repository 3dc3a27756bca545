import math
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stppo import ops

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16


@st.composite
def copies(draw):
    """Draw a source view, and a target view inside a larger tensor of -1. Types, sizes and strides vary."""
    dims = draw(st.sampled_from([1, 2]))
    size = [draw(st.integers(0, 40)) for _ in range(dims)]
    views = []
    for _ in range(2):
        dtype = draw(st.sampled_from([FLOAT32, BFLOAT16]))
        before, after = ([draw(st.integers(0, 5)) for _ in range(dims)] for _ in range(2))
        around = [b + n + a for b, n, a in zip(before, size, after, strict=True)]
        whole = torch.full(around, -1.0, dtype=dtype)
        views.append((whole, whole[tuple(slice(b, b + n) for b, n in zip(before, size, strict=True))]))
    (_, source), (whole, target) = views
    source.copy_(torch.randn(size, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))))
    return source, whole, target


@settings(max_examples=60, deadline=None)
@given(st.lists(copies(), max_size=6))
def test_every_target_gets_its_source_and_nothing_else_changes(cases):
    expected = []
    for source, whole, target in cases:
        after = whole.clone()
        after.as_strided(target.shape, target.stride(), target.storage_offset()).copy_(source)
        expected.append(after)
    ops.BucketCopy([source for source, _, _ in cases], [target for _, _, target in cases])()
    assert all(torch.equal(whole, after) for (_, whole, _), after in zip(cases, expected, strict=True))


def test_rounding_to_bfloat16_is_to_nearest_even_and_nan_stays_nan():
    # bfloat16 has 8 significant bits: the number after 1 is 1 + 1/128. Ties are rounded to even.
    values = [1 + 1 / 256, 1 + 3 / 256, 1 + 1.01 / 256, 3.4e38, -0.0, math.inf, -math.inf, math.nan, 1e-45]
    out = torch.empty(9, dtype=BFLOAT16)
    ops.BucketCopy([torch.tensor(values)], [out])()
    assert out[:2].tolist() == [1, 1 + 4 / 256] and out[2] == 1 + 2 / 256
    assert out[3:7].tolist() == [math.inf, 0, math.inf, -math.inf] and out[4].signbit()
    assert out[7].isnan() and out[8] == 0


def test_every_bit_is_kept_without_a_cast():
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)  # every bfloat16, all NaNs among them
    out = torch.empty(1 << 16, dtype=BFLOAT16)
    ops.BucketCopy([bits.view(BFLOAT16)], [out])()
    assert torch.equal(out.view(torch.int16), bits)
    odd = torch.tensor([0x7F800001, 0x7FC00001], dtype=torch.int32)
    same = torch.empty(2)
    ops.BucketCopy([odd.view(FLOAT32)], [same])()
    assert torch.equal(same.view(torch.int32), odd)


@pytest.mark.parametrize("rows", [1, 3, 1000])  # 1: threads share a row; 3: a cut falls inside one
def test_any_number_of_threads_copies_the_same(rows):
    wide = torch.randn(rows, (1 << 19) // rows)
    whole, cut = wide.bfloat16(), wide[:, 1:-1].bfloat16()
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            out, part = torch.empty_like(whole), torch.empty_like(cut)
            ops.BucketCopy([wide, wide[:, 1:-1]], [out, part])()
            assert torch.equal(out, whole) and torch.equal(part, cut)
    finally:
        torch.set_num_threads(before)


def test_a_prepared_copy_follows_the_values_and_carries_no_gradient():
    source, target = torch.ones(3, 4, requires_grad=True), torch.zeros(3, 4, dtype=BFLOAT16)
    prepared = ops.BucketCopy([source[:, :2]], [target[:, 2:]])
    prepared()
    with torch.no_grad():
        source.fill_(2)
    prepared()
    assert target.tolist() == [[0, 0, 2, 2]] * 3 and not target.requires_grad


def test_empty_copies_are_allowed():
    ops.BucketCopy([], [])()
    ops.BucketCopy([torch.ones(0, 5)], [torch.ones(0, 5)])()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_copies_what_the_cpu_copies():
    if os.environ["STPPO_OPS"] == "torch":
        pytest.skip("the fallback is torch's own copy")
    generator = torch.Generator().manual_seed(0)
    sources, targets = [], []
    for index, (rows, width, skip) in enumerate([(1, 7, 0), (64, 512, 0), (33, 129, 3), (700, 1024, 8)] * 4):
        kinds = FLOAT32 if index & 4 else BFLOAT16, FLOAT32 if index & 8 else BFLOAT16
        sources.append(torch.randn(rows, width + skip, generator=generator).to(kinds[0])[:, skip:])
        targets.append(torch.full((rows, width + skip), -1.0, dtype=kinds[1])[:, :width])
    there = [target.cuda() for target in targets]
    ops.BucketCopy([source.cuda() for source in sources], there)()
    ops.BucketCopy(sources, targets)()
    assert all(torch.equal(a, b.cpu()) for a, b in zip(targets, there, strict=True))
