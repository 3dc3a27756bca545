"""The order of tokens by expert, and the sums of a token's rows: against the definition, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ranks import run_ranks


def routed(tokens: int, experts: int, chosen: int) -> Tensor:
    """Return a random bool [tokens, experts] with `chosen` experts per token."""
    scores = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(tokens))
    return torch.zeros(tokens, experts, dtype=torch.bool).scatter(1, scores.topk(chosen).indices, True)


def rows_and_back(sizes: tuple[int, int, int], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return what `spread` and `gathered` give, and the gradients of the tokens and probabilities."""
    from megatron_stppo.cluster.launch import process

    process.prepare(engine=False)
    from megatron_stppo.model.experts import gathered, of_rows, order_of, spread

    count, experts, chosen = sizes
    torch.manual_seed(0)
    tokens = torch.randn(count, 5).to(dtype).requires_grad_()
    probs = torch.rand(count, experts).requires_grad_()
    expert_TK = routed(*sizes).byte().topk(chosen).indices.sort().values
    order = order_of(expert_TK)
    rows, of_row = spread(tokens, order), of_rows(probs.gather(1, expert_TK), order)
    back = gathered(rows * of_row[:, None].to(dtype), order)
    back.backward(torch.ones_like(back))
    assert tokens.grad is not None and probs.grad is not None
    return {
        "tokens": tokens.detach(),
        "probs": probs.detach(),
        "rows": rows.detach(),
        "back": back.detach(),
        "of tokens": tokens.grad,
        "of probs": probs.grad,
    }


@pytest.mark.parametrize("sizes", [(7, 4, 2), (1, 3, 3), (50, 16, 8), (0, 4, 2)])
def test_rows_are_sorted_by_expert_and_their_sums_are_the_tokens(sizes: tuple[int, int, int]) -> None:
    found = run_ranks(rows_and_back, 1, sizes, torch.float32)[0]
    mask, tokens, probs = routed(*sizes), found["tokens"].double(), found["probs"].double()
    expected = torch.cat([tokens[mask[:, expert]] for expert in range(sizes[1])])
    torch.testing.assert_close(found["rows"].double(), expected, rtol=0, atol=0)
    weight = (probs * mask).sum(1, keepdim=True)
    torch.testing.assert_close(found["back"].double(), tokens * weight, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found["of tokens"].double(), weight.expand(tokens.shape), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        found["of probs"].double(), tokens.sum(1, keepdim=True) * mask, rtol=1e-6, atol=1e-6
    )


def test_bfloat16_rows_are_added_in_float32_and_rounded_once() -> None:
    # 256 + 1 is 256 in bfloat16: added one after the other there, 8 rows of 1 would be lost
    from_rank = run_ranks(sum_of_small, 1)[0]
    assert from_rank == 264.0


def sum_of_small() -> float:
    from megatron_stppo.cluster.launch import process

    process.prepare(engine=False)
    from megatron_stppo.model.experts import gathered, order_of

    rows = torch.tensor([256.0, *[1.0] * 8])[:, None].bfloat16()
    return float(gathered(rows, order_of(torch.arange(9)[None])))
