"""The chunked rule against its definition token by token, and the convolution, in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_stppo.families.qwen3_next.gated_delta_net import Convolution
from megatron_stppo.families.qwen3_next.rule import Chunks, gated_delta_rule

LENGTHS = (70, 1, 64, 5, 130)  # around the size of a chunk


def drawn(tokens: int, heads: int = 2, keys: int = 4, values: int = 3) -> list[Tensor]:
    """Return q, k, v, g and beta."""
    torch.manual_seed(0)
    q, k = torch.nn.functional.normalize(torch.randn(2, tokens, heads, keys).double(), dim=-1)
    v, strength = torch.randn(tokens, heads, values).double(), torch.rand(2, tokens, heads).double()
    return [x.requires_grad_() for x in (q, k, v, -0.3 * strength[0], strength[1])]


def by_definition(given: list[Tensor], lengths: tuple[int, ...]) -> Tensor:
    """S = exp(g) S; S = S + k (beta (v - k^T S))^T; o = q^T S, from S = 0 at the start of a sequence."""
    out = []
    for q, k, v, g, beta in zip(*(x.split(lengths) for x in given), strict=True):
        state = v.new_zeros(v.shape[1], k.shape[2], v.shape[2])
        for t in range(len(v)):
            state = state * g[t].exp()[:, None, None]
            written = beta[t, :, None] * (v[t] - torch.einsum("hk,hkv->hv", k[t], state))
            state = state + k[t, :, :, None] * written[:, None]
            out.append(torch.einsum("hk,hkv->hv", q[t], state))
    return torch.stack(out)


def chunked(given: list[Tensor], lengths: tuple[int, ...], size: int = 64) -> Tensor:
    return gated_delta_rule(*given, Chunks.of(lengths, torch.device("cpu"), size))


def test_chunks_give_the_result_and_the_gradients_of_the_definition() -> None:
    given = drawn(sum(LENGTHS))
    wanted, weigh = by_definition(given, LENGTHS), torch.randn(sum(LENGTHS), 2, 3).double()
    expected = torch.autograd.grad((wanted * weigh).sum(), given)
    for size in (16, 64):
        out = chunked(given, LENGTHS, size)
        torch.testing.assert_close(out, wanted, atol=1e-13, rtol=0)
        found = torch.autograd.grad((out * weigh).sum(), given)
        for own, other in zip(found, expected, strict=True):
            assert (own - other).norm() < 1e-13 * other.norm()


def test_places_and_steps_of_chunks() -> None:
    chunks = Chunks.of((3, 5), torch.device("cpu"), 4)
    assert chunks.place.tolist() == [0, 1, 2, 4, 5, 6, 7, 8] and chunks.count == 3
    assert [step.tolist() for step in chunks.steps] == [[1, 0], [2]]


def test_the_convolution_reads_the_tokens_before_in_the_same_sequence_only() -> None:
    """Of tokens 1, 2, 3 and 10, 20 and the filter [4, 3, 2, 1]: 1, 2 + 2, 3 + 4 + 3; 10, 20 + 20."""
    x = torch.tensor([[1.0], [2], [3], [10], [20]])
    weight, position = torch.tensor([[[4.0, 3, 2, 1]]]), torch.tensor([0, 1, 2, 0, 1])
    assert Convolution.apply(x, weight, position)[:, 0].tolist() == [1, 4, 10, 10, 40]


def test_the_convolution_has_the_gradients_of_torch() -> None:
    torch.manual_seed(0)
    x: Any = torch.randn(9, 3).double().requires_grad_()
    weight: Any = torch.randn(3, 1, 4).double().requires_grad_()
    position = torch.tensor([0, 1, 2, 3, 4, 0, 0, 1, 2])
    assert torch.autograd.gradcheck(Convolution.apply, (x, weight, position))
