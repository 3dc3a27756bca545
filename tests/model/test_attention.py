"""Grouped queries with the variable-length attention of different versions of torch; the length of tables."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megatron_stppo.cluster.launch import process
from tests.ranks import run_ranks

LENGTHS = (3, 5)
HEADS, KV_HEADS, SIZE = 6, 2, 8


def older(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """varlen_attn of torch 2.11, on a CPU: without enable_gqa."""
    assert query.shape[1] == key.shape[1] == value.shape[1], "as many heads of keys as of queries"
    return newer(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size)


def newer(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """varlen_attn of torch 2.13, on a CPU."""
    assert window_size == (-1, 0) and max_q == max_k == max(LENGTHS)
    assert enable_gqa or query.shape[1] == key.shape[1]
    out = []
    for a, b in pairwise(cu_seq_q.tolist()):
        q, k, v = (x[a:b].transpose(0, 1)[None] for x in (query, key, value))
        out.append(scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa))
    return torch.cat(out, dim=2)[0].transpose(0, 1)


def compare(version: Callable[..., Tensor]) -> None:
    """Compare values and gradients with attention that is written out, in float64."""
    process.prepare(engine=False)
    from megatron_stppo.model.attention import for_groups

    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(sum(LENGTHS), heads, SIZE, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    offsets = torch.tensor([0, LENGTHS[0], sum(LENGTHS)], dtype=torch.int32)
    given = (offsets, offsets, max(LENGTHS), max(LENGTHS))
    got = for_groups(version)(query, key, value, *given, scale=0.5, window_size=(-1, 0))
    of_head = [head * KV_HEADS // HEADS for head in range(HEADS)]  # 0, 0, 0, 1, 1, 1
    expected = torch.zeros_like(got)
    for a, b in pairwise(offsets.tolist()):
        scores = torch.einsum("qhd,khd->hqk", query[a:b], key[a:b, of_head]) * 0.5
        scores = scores.masked_fill(torch.ones(b - a, b - a).triu(1).bool(), -torch.inf)
        expected[a:b] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value[a:b, of_head])
    torch.testing.assert_close(got, expected)
    weight = torch.randn(got.shape, generator=generator, dtype=torch.float64)
    gradients = [torch.autograd.grad((x * weight).sum(), (query, key, value)) for x in (got, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("version", [older, newer])
def test_grouped_queries_need_no_enable_gqa(version: Callable[..., Tensor]) -> None:
    run_ranks(compare, 1, version)


def lengths_of_tables() -> tuple[list[int], int]:
    """Return the lengths of megatron's tables of angles if PackedAttention rotates, and one if not."""
    process.prepare(engine=False)
    from megatron_stppo.model.attention import Pack

    mesh = SimpleNamespace(context_rank=0, context_size=1, context_group=None)

    def length(longest: int, rotates: bool) -> int:
        offsets, lengths = torch.tensor([0, longest], dtype=torch.int32), torch.tensor([longest])
        given = {"longest": longest, "lengths": lengths, "keys": None, "position_P": None}
        microbatch = SimpleNamespace(sequence_offsets=offsets, **given)
        return Pack.of(microbatch, mesh, rotates).max_seqlen_q  # type: ignore[arg-type,return-value]

    return [length(n, True) for n in (1, 2, 3, 4, 5, 4096, 4097)], length(5, False)


def test_tables_of_angles_have_few_lengths() -> None:
    """megatron keeps those of 32 lengths on the device."""
    assert run_ranks(lengths_of_tables, 1) == [([1, 2, 4, 4, 8, 4096, 8192], 5)]


def shared_gradient() -> None:
    """A row that 64 others read, and one that none reads: each gradient is the float32 sum, rounded once."""
    process.prepare(engine=False)
    from megatron_stppo.model.attention import Chosen

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 2, 4, generator=generator).bfloat16().requires_grad_()
    where = torch.tensor([0] * 64 + [2])
    given = torch.randn(65, 2, 4, generator=generator).bfloat16()
    out = Chosen.apply(x, where)
    assert torch.equal(out, x[where])
    (found,) = torch.autograd.grad((out * given).sum(), x)
    assert torch.equal(found[0], given[:64].float().sum(0).bfloat16())
    assert torch.equal(found[1:], torch.stack([torch.zeros(2, 4).bfloat16(), given[64]]))


def test_gradients_of_shared_keys_are_added_in_float32() -> None:
    run_ranks(shared_gradient, 1)


def kept_once() -> None:
    """Chosen keys and values are gone after the forward pass, and gradients are those of keys that stay."""
    process.prepare(engine=False)
    from megatron_stppo.model.attention import Chosen, again

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 2, 1, SIZE, generator=generator, dtype=torch.float64, requires_grad=True)
    query = torch.randn(1, 1, 5, SIZE, generator=generator, dtype=torch.float64, requires_grad=True)
    where, gradients = torch.tensor([0, 1, 1, 2, 0]), []
    for context in (again, lambda *given: nullcontext()):
        chosen = Chosen.apply(x, where)
        with context(x, where, chosen):
            key, value = (one.transpose(0, 1)[None] for one in chosen.unbind(1))
            out = sum(scaled_dot_product_attention(query, key, value)[..., 0, n] for n in range(3))
            out = out + (key * value).sum()
        gone = weakref.ref(chosen.untyped_storage())
        del chosen, key, value
        assert (gone() is None) == (context is again)
        gradients.append(torch.autograd.grad(out, (x, query)))
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_keys_of_shared_tokens_are_kept_once() -> None:
    run_ranks(kept_once, 1)


def continued(dtype: torch.dtype) -> list[float]:
    """Return the largest errors of output and gradients of both forms, relative to the largest number,
    against a mask in float64."""
    process.prepare(engine=False)
    from megatron_stppo.model.attention import Continued, masked

    generator = torch.Generator().manual_seed(0)
    sizes = ((HEADS, 5), (KV_HEADS, 12), (KV_HEADS, 12))
    given = [(3 * torch.randn(1, heads, n, SIZE, generator=generator)).to(dtype) for heads, n in sizes]
    weight = torch.randn(1, HEADS, 5, SIZE, generator=generator).to(dtype)
    mask = torch.ones(5, 12, dtype=torch.bool).tril(7)
    found = []
    for attend, to in (
        (lambda *x: Continued.apply(*x, 0.5), dtype),
        (lambda *x: masked(*x, 0.5), dtype),
        (lambda *x: scaled_dot_product_attention(*x, mask, scale=0.5, enable_gqa=True), torch.float64),
    ):
        own = [x.to(to).requires_grad_() for x in given]
        out = attend(*own)
        found.append((out, *torch.autograd.grad((out * weight.to(to)).sum(), own)))
    *both, exact = found
    pairs = [(x, y) for one in both for x, y in zip(one, exact, strict=True)]
    return [float((x.double() - y).abs().max() / y.abs().max()) for x, y in pairs]


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float64, 1e-13), (torch.float32, 2e-5), (torch.bfloat16, 0.05)]
)
def test_attention_in_two_parts_equals_attention_with_a_mask(dtype: torch.dtype, limit: float) -> None:
    (errors,) = run_ranks(continued, 1, dtype)
    assert max(errors) < limit, errors


def chosen_after_their_heads_are_repeated() -> None:
    """Two heads of queries for one of keys and values, which torch 2.11 must repeat."""
    process.prepare(engine=False)
    from megatron_stppo.model.attention import Chosen, for_groups, heads_for

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 2, 1, SIZE, generator=generator, dtype=torch.float64, requires_grad=True)
    query = torch.randn(sum(LENGTHS), 2, SIZE, generator=generator, dtype=torch.float64)
    where = torch.arange(sum(LENGTHS)) % 3
    offsets = torch.tensor([0, LENGTHS[0], sum(LENGTHS)], dtype=torch.int32)
    gradients = []
    for version in (older, newer):
        chosen = Chosen.apply(heads_for(version, query, x), where)

        @wraps(version)
        def attend(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            assert key.data_ptr() == chosen.data_ptr(), "a copy would be kept for the backward pass"  # noqa: B023
            return version(query, key, *args, **kwargs)  # noqa: B023

        given = (offsets, offsets, max(LENGTHS), max(LENGTHS))
        out = for_groups(attend)(query, *chosen.unbind(1), *given, window_size=(-1, 0))
        gradients.append(torch.autograd.grad(out.square().sum(), x))
    torch.testing.assert_close(*gradients)


def test_heads_are_repeated_before_the_keys_of_shared_tokens_are_chosen() -> None:
    run_ranks(chosen_after_their_heads_are_repeated, 1)


def saved_by_attention() -> list[int]:
    """Return the rows of what attention saves for its backward pass outside of `again`: of 6 tokens in two
    pieces, which share the first and have 7 keys together."""
    process.prepare(engine=False)
    from torch.autograd.graph import saved_tensors_hooks

    from megatron_stppo.config import ParallelConfig
    from megatron_stppo.model.attention import Pack, PackedAttention, Pieces, Rotation
    from megatron_stppo.parallel import groups

    mesh, saved = groups.initialize(ParallelConfig()), list[int]()
    keys = torch.tensor([3, 4]), torch.tensor([0, 1, 2, 0, 3, 4, 5])
    pieces = Pieces.of(torch.tensor([3, 3]), torch.device("cpu"), mesh, keys)
    pack = Pack(pieces=pieces, rotation=Rotation(torch.ones(6, 1, SIZE), torch.zeros(6, 1, SIZE)))
    settings: Any = SimpleNamespace(kv_channels=SIZE)
    query, key, value = (torch.ones(6, heads, SIZE, requires_grad=True) for heads in (2, 1, 1))

    def kept(x: Tensor) -> Tensor:
        saved.append(x.untyped_storage().nbytes() // (SIZE * x.element_size()))
        return x

    with saved_tensors_hooks(kept, lambda x: x):
        PackedAttention(settings, 1, None, None)(query, key, value, packed_seq_params=pack)
    return saved


def test_attention_keeps_no_chosen_keys_and_values() -> None:
    ((*saved,),) = run_ranks(saved_by_attention, 1)
    assert 2 * 7 not in saved, "keys and values of 7 tokens"
