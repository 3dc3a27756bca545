"""Attention with sinks and windows: one formula, and the one that a GPU computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_stppo.families.gpt_oss.layers import SinkOnFlash, seen, with_sinks


@dataclass(frozen=True)
class Plain:
    """What FlashPieces does on a GPU, for one piece and in plain operations."""

    scale: float
    window: int

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        mask = seen(len(q), len(k), self.window, q.device)
        return (torch.einsum("qhd,khd->hqk", q, k) * self.scale).masked_fill(~mask, -torch.inf)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        scores = self._scores(q, k)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1)

    def gradients(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsum: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        p = (self._scores(q, k) - logsum[..., None]).exp()
        along = (gradient * out).sum(-1).t()[..., None]
        of_scores = p * (torch.einsum("qhd,khd->hqk", gradient, v) - along) * self.scale
        of_q = torch.einsum("hqk,khd->qhd", of_scores, k)
        return of_q, torch.einsum("hqk,qhd->khd", of_scores, q), torch.einsum("hqk,qhd->khd", p, gradient)


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("queries", [7, 4])
def test_sinks_added_to_attention_without_them_give_the_formula_and_its_gradients(
    window: int, queries: int
) -> None:
    generator = torch.Generator().manual_seed(window)
    shapes = ((queries, 4, 5), (7, 4, 5), (7, 4, 5), (4,))
    given: list[Any] = [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes
    ]
    *qkv, sinks = given
    found = SinkOnFlash.apply(*qkv, sinks, Plain(0.4, window))
    expected = with_sinks(*(x.transpose(0, 1)[None] for x in qkv), sinks, 0.4, window)[0].transpose(0, 1)
    torch.testing.assert_close(found, expected, atol=1e-14, rtol=1e-13)
    weigh = torch.randn(found.shape, generator=generator, dtype=torch.float64)
    gradients = [torch.autograd.grad((out * weigh).sum(), given) for out in (found, expected)]
    for own, other in zip(*gradients, strict=True):
        torch.testing.assert_close(own, other, atol=1e-14, rtol=1e-12)


def test_a_window_of_two_tokens_is_a_token_and_the_one_before() -> None:
    assert seen(2, 3, 2, torch.device("cpu")).tolist() == [[True, True, False], [False, True, True]]
