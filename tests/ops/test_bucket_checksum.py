import math
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stppo import ops
from megatron_stppo.ops.bucket_checksum import PIECE
from tests.ops.draws import normal

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16


def mixed(z):
    """Return the output function of SplitMix64, computed with Python integers."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def by_definition(tensor):
    low, high = tensor.numel() * tensor.itemsize, 0
    for i, x in enumerate(tensor.contiguous().view(-1).view(torch.int16).tolist()):
        number, piece = mixed(i % PIECE + 1), mixed(PIECE + 1 + i // PIECE)
        low += x * (number % 2**15 | 1) * (piece % 2**32 | 1)
        high += x * ((number >> 16) % 2**15 | 1) * (piece >> 32 | 1)
    return (low % 2**32 + 2**32 * high + 2**63) % 2**64 - 2**63


def sums(*tensors, dtype=None):
    return ops.BucketChecksum(tensors, [dtype or x.dtype for x in tensors])().tolist()


@st.composite
def views(draw):
    """Draw a slice of a larger tensor and the type of the cast. Types, sizes, strides and alignment vary."""
    dims = draw(st.sampled_from([1, 2]))
    size = [draw(st.integers(0, 90)) for _ in range(dims)]
    before, after = ([draw(st.integers(0, 5)) for _ in range(dims)] for _ in range(2))
    around = [b + n + a for b, n, a in zip(before, size, after, strict=True)]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    whole = torch.randn(around, generator=generator).to(draw(st.sampled_from([FLOAT32, BFLOAT16])))
    cut = tuple(slice(b, b + n) for b, n in zip(before, size, strict=True))
    return whole[cut], draw(st.sampled_from([FLOAT32, BFLOAT16]))


@settings(max_examples=60, deadline=None)
@given(st.lists(views(), max_size=6))
def test_every_sum_agrees_with_the_definition(cases):
    tensors, dtypes = [tensor for tensor, _ in cases], [dtype for _, dtype in cases]
    expected = [by_definition(tensor.to(dtype)) for tensor, dtype in cases]
    prepared = ops.BucketChecksum(tensors, dtypes)
    assert prepared().tolist() == expected
    assert [int(ops.checksum(*case)) for case in cases] == expected


@pytest.mark.parametrize("size", [PIECE - 1, PIECE, PIECE + 1, 5 * PIECE + 3])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_sums_are_correct_around_the_ends_of_pieces(size, dtype):
    source = normal(size + 3)
    for tensor in (source[:size], source[3:]):
        assert sums(tensor, dtype=dtype) == [by_definition(tensor.to(dtype))]


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_a_cast_is_summed_with_the_bits_that_the_copy_writes(dtype):
    source = normal(40, 70)
    source[3, 5:60], source[4, ::2], source[5] = math.nan, -0.0, 3.4e38
    source.view(torch.int32)[6] = 0x7F800001  # a NaN whose payload bfloat16 cannot hold
    source[7], source[8, 1::2] = 1 + 1 / 256, -math.inf
    target = torch.empty(40, 66, dtype=dtype)
    ops.BucketCopy([source[:, 1:67]], [target])()
    assert sums(source[:, 1:67], dtype=dtype) == sums(target)


def test_every_bit_changes_the_sum():
    assert sums(torch.tensor([0.0])) != sums(torch.tensor([-0.0]))
    rows = normal(7, 13).bfloat16()
    total, bits = sums(rows), rows.view(torch.int16)
    for element in range(91):
        for bit in (0, 7, 14):
            bits.view(-1)[element] ^= 1 << bit
            assert sums(rows) != total
            bits.view(-1)[element] ^= 1 << bit
    assert sums(rows) == total
    nans = torch.tensor([0x7FC00001, 0x7FC00002], dtype=torch.int32).view(FLOAT32)
    assert sums(nans[:1]) != sums(nans[1:])


def test_sums_depend_on_order_and_length_but_not_on_the_memory_layout():
    rows = normal(7, 13)
    assert sums(rows[[1, 0, 2, 3, 4, 5, 6]]) != sums(rows)
    assert sums(rows[:, :12]) != sums(rows[:, 1:])
    assert sums(torch.zeros(8)) != sums(torch.zeros(9))
    far = torch.zeros(4 * PIECE)
    far[5] = 1
    assert sums(far) != sums(far.roll(PIECE)) != sums(far.roll(2 * PIECE))
    assert sums(rows[:, 2:9], rows.t()) == sums(rows[:, 2:9].clone(), rows.t().contiguous())


def test_types_without_a_kernel_are_summed_too():
    source = normal(5, 9)
    for dtype in (torch.float64, torch.float16):
        cast = source.to(dtype)
        assert sums(source, dtype=dtype) == sums(cast) == [int(ops.checksum(cast))]
        cast[4, 8] += 1
        assert sums(source, dtype=dtype) != sums(cast)


@pytest.mark.parametrize("rows", [1, 3, 1000])  # 1: threads share a row; 3: a cut falls inside one
def test_any_number_of_threads_gives_the_same_sums(rows):
    wide = normal(rows, (1 << 18) // rows)
    found, before = set(), torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.add(tuple(sums(wide, wide[:, 1:-1], wide[:0], dtype=BFLOAT16)))
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1


def test_a_prepared_checksum_follows_the_values():
    source = torch.ones(3, 4, requires_grad=True)
    prepared = ops.BucketChecksum([source[:, :2]], [BFLOAT16])
    before = prepared()
    with torch.no_grad():
        source[0, 1] = 2
    assert prepared() != before and not prepared().requires_grad
    assert ops.BucketChecksum([], [])().tolist() == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_sums_of_the_cpu():
    if os.environ["STPPO_OPS"] == "torch":
        pytest.skip("the fallback is the same code on both")
    tensors, dtypes = [], []
    for index, (rows, width, skip) in enumerate([(1, 7, 0), (64, 512, 0), (33, 129, 3), (700, 1024, 8)] * 4):
        kinds = FLOAT32 if index & 4 else BFLOAT16, FLOAT32 if index & 8 else BFLOAT16
        tensors.append(normal(rows, width + skip, seed=index).to(kinds[0])[:, skip:])
        dtypes.append(kinds[1])
    there = ops.BucketChecksum([tensor.cuda() for tensor in tensors], dtypes)
    assert there().tolist() == there().tolist() == ops.BucketChecksum(tensors, dtypes)().tolist()
