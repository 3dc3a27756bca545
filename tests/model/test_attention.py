"""Attention of packed sequences: with shared tokens, in two parts, with the variable-length attention of
different versions of torch; the length of tables."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megatron_stppo.cluster.launch import process
from tests.ranks import run_ranks

HEADS, KV_HEADS, SIZE = 6, 2, 8


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


def varlen(query: Tensor, key: Tensor, value: Tensor, *offsets: Any, **settings: Any) -> Tensor:
    """varlen_attn on a CPU: of torch 2.13 with enable_gqa, and of torch 2.11 without it."""
    grouped = settings.get("enable_gqa", False)
    assert settings["window_size"] == (-1, 0) and (grouped or query.shape[1] == key.shape[1])
    queries, keys = (pairwise(x.tolist()) for x in offsets[:2])
    out = []
    for (a, b), (c, d) in zip(queries, keys, strict=True):
        q, k, v = (x.transpose(0, 1)[None] for x in (query[a:b], key[c:d], value[c:d]))
        mask = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - b + a)
        out.append(
            scaled_dot_product_attention(q, k, v, mask, scale=settings["scale"], enable_gqa=bool(grouped))
        )
    return torch.cat(out, dim=2)[0].transpose(0, 1)


def attended(grouped: bool | None) -> tuple[list[int], list[Tensor]]:
    """Return the rows of what attention saves for its backward pass outside of `again`, and its output and
    gradients: of 6 tokens in two pieces, which share the first and have 7 keys together.

    grouped: whether varlen_attn takes fewer heads of keys; None: attention piece by piece.
    """
    process.prepare(engine=False)
    from torch.autograd.graph import saved_tensors_hooks

    from megatron_stppo.config import ParallelConfig
    from megatron_stppo.model import attention
    from megatron_stppo.model.attention import Pack, PackedAttention, Pieces, Rotation
    from megatron_stppo.parallel import groups

    mesh, saved = groups.initialize(ParallelConfig()), list[int]()
    keys = torch.tensor([3, 4]), torch.tensor([0, 1, 2, 0, 3, 4, 5])
    pieces = Pieces.of(torch.tensor([3, 3]), torch.device("cpu"), mesh, keys)
    pack = Pack(pieces=pieces, rotation=Rotation(torch.ones(6, 1, SIZE), torch.zeros(6, 1, SIZE)))
    generator = torch.Generator().manual_seed(0)
    given = [
        torch.randn(6, heads, SIZE, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]

    def kept(x: Tensor) -> Tensor:
        saved.append(x.untyped_storage().nbytes() // (SIZE * x.element_size()))
        return x

    settings: Any = SimpleNamespace(kv_channels=SIZE)
    layer = PackedAttention(settings, 1, None, None)
    with pytest.MonkeyPatch.context() as patch, saved_tensors_hooks(kept, lambda x: x):
        if grouped is not None:
            patch.setattr(attention, "varlen_attn", varlen)
            patch.setattr(attention, "GROUPED", grouped)
            patch.setattr(layer, "_uses_varlen", lambda query: True)
        out = layer(*given, packed_seq_params=pack)
    return saved, [out.detach(), *torch.autograd.grad(out.square().sum(), given)]


def test_attention_of_each_kind_gives_the_same_and_keeps_no_chosen_keys_and_values() -> None:
    kept, pieces = run_ranks(attended, 1, None)[0]
    assert 2 * 7 * KV_HEADS not in kept, "keys and values of 7 tokens"
    for grouped in (True, False):
        kept, numbers = run_ranks(attended, 1, grouped)[0]
        assert not {2 * 7 * KV_HEADS, 7 * HEADS, 2 * 7 * HEADS} & {*kept}, "keys and values of 7 tokens"
        torch.testing.assert_close(numbers, pieces)
