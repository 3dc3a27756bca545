"""The clipped surrogate gives the same bits in every repeat, on any grid and for any packing."""

from functools import cache
from importlib import import_module

import pytest
import torch

from megatron_stppo import ops
from megatron_stppo.ops import extension
from tests.ops.draws import fallback, offsets_of, same_bits, three, uniform

pytestmark = pytest.mark.usefixtures("device")
LENGTHS = [5, 40_000, 33_000, 1, 0, 700, 31, 9, *[3] * 2000, 4500]
MOST_TILES = 528  # SURROGATE_MOST_TILES of csrc/ops.h
# Sizes of the input: one for each tile, 1,024, 2,048 and 4,096.
SIZES = {1024: MOST_TILES * 1024 // 2, 2048: MOST_TILES * 1536, 4096: MOST_TILES * 2048 + 100_000}


@cache
def inputs(total, device):
    """Return the tensors of a call, for all its repeats. Some weights are 0."""
    weight = uniform(total)
    return three(total), {"weight": weight * (weight > 0.2), "sum_p_sq": uniform(total, seed=3)}


def mixed(power=0.0):
    """Run the op on turns of all length classes. Two long turns are neighbours."""
    given, settings = inputs(sum(LENGTHS), torch.get_default_device())
    return ops.clipped_surrogate(
        *given, offsets_of(*LENGTHS), **settings, clip_length_power=power, with_bias=True
    )


def narrowed():
    return mixed(0.7)


def by_token():
    given, settings = inputs(9001, torch.get_default_device())
    return ops.clipped_surrogate(*given, **settings, with_bias=True)


@pytest.mark.parametrize("evaluate", [mixed, narrowed, by_token])
def test_100_repeats_are_bitwise_equal(evaluate):
    first = evaluate()
    for _ in range(99):
        assert same_bits(first, evaluate())


@pytest.mark.parametrize("evaluate", [mixed, narrowed, by_token])
def test_the_grid_of_a_gpu_changes_no_bit(evaluate, monkeypatch, raises):
    if raises:
        pytest.skip("no grid: these run on a GPU, and on the CUDA kernels in tests/csrc/emulated")
    whole, module = evaluate(), import_module("megatron_stppo.ops.clipped_surrogate")
    for blocks in (1, 2, 7):
        monkeypatch.setattr(module, "MAX_BLOCKS", blocks)
        assert same_bits(whole, evaluate())


@pytest.mark.parametrize("evaluate", [mixed, narrowed, by_token])
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
    settings = {"weight": 0.5, "clip_length_power": 0.7, "with_bias": True}
    alone = ops.clipped_surrogate(*turn, offsets_of(length), **settings)
    for before in (1, 2, 7, 17, 4096) if length < 4096 else (1, 7, 4095):
        for cut in (offsets_of(before, length, 2), offsets_of(*[1] * before, length, 1, 1)):
            around = three(before + 2)
            packed = [torch.cat([a[:before], b, a[before:]]) for a, b in zip(around, turn, strict=True)]
            out = ops.clipped_surrogate(*packed, cut, **settings)
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


@pytest.fixture
def tiled(implementation):
    if implementation == "torch":
        pytest.skip("torch has no tiles")


def test_the_tile_is_the_smallest_of_three_with_at_most_528_tiles_or_the_largest(tiled):
    for work in (0, 1023, 1024, MOST_TILES * 1024 - 1):
        assert extension.surrogate_tiles(work) == work // 1024 + 1
    for work in (MOST_TILES * 1024, MOST_TILES * 2048 - 1):
        assert extension.surrogate_tiles(work) == work // 2048 + 1
    for work in (MOST_TILES * 2048, MOST_TILES * 4096 - 1, MOST_TILES * 4096, 2**40):
        assert extension.surrogate_tiles(work) == work // 4096 + 1
    for tile, work in SIZES.items():
        assert extension.surrogate_tiles(work) == work // tile + 1


@cache
def large(size, device):
    """Return tensors and lengths of turns: LENGTHS, and turns of 25,000 up to `size` tokens + turns."""
    lengths = list(LENGTHS)
    while (left := size - sum(lengths) - len(lengths)) > 0:
        lengths.append(min(25_000, left - 1))
    total = sum(lengths)
    return three(total), {"weight": uniform(total), "sum_p_sq": uniform(total, seed=3)}, offsets_of(*lengths)


@pytest.mark.parametrize("tile", SIZES)
def test_the_float64_sums_of_a_turn_do_not_depend_on_the_tile(tile, device, tiled):
    surrogate = import_module("megatron_stppo.ops.clipped_surrogate")
    given, settings, cut = large(SIZES[tile], device)
    inputs = (*given, settings["weight"])
    sums = surrogate.summed(surrogate.Given(*inputs, cut))
    for turn in (1, 2, 5, len(LENGTHS) - 1):  # 40,000, 33,000, 700 and 4,500 tokens
        mine = slice(int(cut[turn]), int(cut[turn + 1]))
        own = surrogate.Given(*(x[mine] for x in inputs), offsets_of(LENGTHS[turn]))
        alone = surrogate.summed(own)
        assert sums[turn].equal(alone[0])


@pytest.mark.parametrize("tile", SIZES)
@pytest.mark.parametrize("power", [0.0, 1.0])
def test_all_outputs_equal_the_fallbacks_for_every_tile(tile, power, device, tiled):
    given, settings, cut = large(SIZES[tile], device)
    settings = settings | {"clip_length_power": power, "with_bias": True}
    for segments in (cut, None) if power == 0 else (cut,):
        mine = ops.clipped_surrogate(*given, segments, **settings)
        with fallback():
            expected = ops.clipped_surrogate(*given, segments, **settings)
        assert mine.tokens.item() == (settings["weight"] != 0).sum().item()
        for name, value in mine._asdict().items():
            other = getattr(expected, name)
            scale = max(1.0, float(other.abs().max()))
            torch.testing.assert_close(value, other, rtol=2e-5, atol=1e-6 * scale, msg=name)


@pytest.mark.parametrize("tile", SIZES)
def test_the_grid_changes_no_bit_for_any_tile(tile, device, monkeypatch, raises, tiled):
    if raises:
        pytest.skip("no grid: these run on a GPU, and on the CUDA kernels in tests/csrc/emulated")
    given, settings, cut = large(SIZES[tile], device)
    whole = ops.clipped_surrogate(*given, cut, **settings, with_bias=True)
    monkeypatch.setattr(import_module("megatron_stppo.ops.clipped_surrogate"), "MAX_BLOCKS", 7)
    assert same_bits(whole, ops.clipped_surrogate(*given, cut, **settings, with_bias=True))


def test_sizes_at_which_the_tile_changes_lose_no_token(tiled):
    given = three(MOST_TILES * 2048)
    whole = ops.clipped_surrogate(*given, weight=0.5)
    for total in (MOST_TILES * 1024 - 1, MOST_TILES * 1024, MOST_TILES * 2048 - 1, MOST_TILES * 2048):
        part = ops.clipped_surrogate(*(x[:total] for x in given), weight=0.5)
        assert part.tokens.item() == total
        assert part.grad_T.equal(whole.grad_T[:total]) and part.ratio.equal(whole.ratio[:total])
        delta = given[0][:total].double() - given[1][:total].double()
        assert part.kl_k1.item() == pytest.approx(-delta.mean().item(), rel=1e-4)
