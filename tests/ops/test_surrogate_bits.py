"""The clipped surrogate gives the same bits in every repeat, on any grid and for any packing."""

from functools import cache
from importlib import import_module

import pytest
import torch

from megatron_stppo import ops
from tests.ops.draws import offsets_of, same_bits, three, uniform

pytestmark = pytest.mark.usefixtures("device")
LENGTHS = [5, 40_000, 33_000, 1, 0, 700, 31, 9, *[3] * 2000, 4500]


@cache
def inputs(total, device):
    """Return the tensors of a call, for all its repeats. Some weights are 0."""
    weight = uniform(total)
    return three(total), {"weight": weight * (weight > 0.2), "sum_p_sq": uniform(total, seed=3)}


def mixed():
    """Run the op on turns of all length classes. Two long turns are neighbours."""
    given, settings = inputs(sum(LENGTHS), torch.get_default_device())
    return ops.clipped_surrogate(*given, offsets_of(*LENGTHS), **settings, with_bias=True)


def by_token():
    given, settings = inputs(9001, torch.get_default_device())
    return ops.clipped_surrogate(*given, **settings, with_bias=True)


@pytest.mark.parametrize("evaluate", [mixed, by_token])
def test_100_repeats_are_bitwise_equal(evaluate):
    first = evaluate()
    for _ in range(99):
        assert same_bits(first, evaluate())


@pytest.mark.parametrize("evaluate", [mixed, by_token])
def test_the_grid_of_a_gpu_changes_no_bit(evaluate, monkeypatch, raises):
    if raises:
        pytest.skip("no grid: these run on a GPU, and on the CUDA kernels in tests/csrc/emulated")
    whole, module = evaluate(), import_module("megatron_stppo.ops.clipped_surrogate")
    for blocks in (1, 2, 7):
        monkeypatch.setattr(module, "MAX_BLOCKS", blocks)
        assert same_bits(whole, evaluate())


@pytest.mark.parametrize("evaluate", [mixed, by_token])
def test_threads_change_no_bit(evaluate, implementation):
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(evaluate())
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert other.ratio.equal(results[0].ratio) and other.grad_T.equal(results[0].grad_T)
        # the order in which torch sums long tensors depends on the number of threads
        assert implementation == "torch" or same_bits(results[0], other)


@pytest.mark.parametrize("length", [1, 3, 31, 33, 100, 512, 513, 5000, 33_000])
def test_the_bits_of_a_turn_do_not_depend_on_its_neighbours(length):
    turn = three(length, seed=1)
    alone = ops.clipped_surrogate(*turn, offsets_of(length), weight=0.5, with_bias=True)
    for before in (1, 2, 7, 17, 4096) if length < 4096 else (1, 7, 4095):
        for cut in (offsets_of(before, length, 2), offsets_of(*[1] * before, length, 1, 1)):
            around = three(before + 2)
            packed = [torch.cat([a[:before], b, a[before:]]) for a, b in zip(around, turn, strict=True)]
            out = ops.clipped_surrogate(*packed, cut, weight=0.5, with_bias=True)
            mine = slice(before, before + length)
            where = 1 if len(cut) == 4 else before
            assert out.ratio[where].equal(alone.ratio[0])
            assert out.grad_T[mine].equal(alone.grad_T) and out.bias_T[mine].equal(alone.bias_T)


def test_the_bits_of_a_token_do_not_depend_on_its_neighbours():
    given = three(4200)
    whole = ops.clipped_surrogate(*given, weight=0.5)
    for start in range(1, 18):
        part = ops.clipped_surrogate(*(x[start:] for x in given), weight=0.5)
        assert part.grad_T.equal(whole.grad_T[start:]) and part.ratio.equal(whole.ratio[start:])
