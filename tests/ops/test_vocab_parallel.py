"""Sharded equals unsharded, on real gloo ranks and for the merge alone over any number of shards."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stppo import ops
from megatron_stppo.algorithm.vocabulary import logits_gradient, merge, shard_statistics
from tests.ops.sharded import VOCABULARY, evaluate, on_a_rank, whole_logits
from tests.ranks import run_ranks


def test_two_ranks_equal_one_and_raise_together():
    expected, expected_grad = evaluate(whole_logits())
    ranks = run_ranks(on_a_rank, 2)
    for outputs, _, complaint, lengths in ranks:
        for output, first, value in zip(outputs, ranks[0][0], expected, strict=True):
            assert output.equal(first)  # the same bits on every rank
            torch.testing.assert_close(output, value)
        assert "target[0]=13 lies outside every shard" in complaint
        assert lengths == [0, 0, 0]
    gradient = torch.cat([grad for _, grad, _, _ in ranks], dim=1)
    torch.testing.assert_close(gradient, expected_grad)
    assert not gradient[:, VOCABULARY:].any() and not gradient[4].any()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 2**31))
def test_merge_of_any_shards_equals_one_shard(widths, seed):
    generator = torch.Generator().manual_seed(seed)
    total = sum(widths) + 1
    logits = torch.randn(4, total, generator=generator) * 10
    target = torch.randint(total, (4,), generator=generator)
    temperature = torch.ones(4)
    whole = merge(shard_statistics(logits, target, temperature, 0, total)[None])
    shards, start = [], 0
    for width in [*widths, 1]:
        part = logits[:, start : start + width]
        shards.append(shard_statistics(part, target, temperature, start, width))
        start += width
    merged = merge(torch.stack(shards))
    for name in ("logprob_T", "entropy_T", "sum_p_sq_T"):
        torch.testing.assert_close(getattr(merged, name), getattr(whole, name), rtol=1e-5, atol=2e-6)
    assert not merged.missing_T.any()
    cotangents = tuple(torch.randn(4, generator=generator) for _ in range(3))
    no_T = torch.zeros(4, dtype=torch.bool)
    expected = logits_gradient(logits, target, temperature, 0, total, whole, no_T, cotangents)
    start = 0
    for width in [*widths, 1]:
        part = logits[:, start : start + width]
        found = logits_gradient(part, target, temperature, start, width, whole, no_T, cotangents)
        torch.testing.assert_close(found, expected[:, start : start + width])
        start += width


def test_one_shard_of_several_without_a_group_refuses_other_shards_targets():
    with pytest.raises(ValueError, match=r"target\[1\]=8 lies outside"):
        ops.vocab_logprob(torch.zeros(2, 8), torch.tensor([7, 8]))
    logprob, _, _ = ops.vocab_logprob(torch.zeros(1, 8), torch.tensor([8]), vocab_start=8)
    assert logprob.item() == pytest.approx(-math.log(8))
