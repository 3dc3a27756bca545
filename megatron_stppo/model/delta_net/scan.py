"""The states of a gated delta net from chunk to chunk, as one operation of autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_stppo.ops.extension import has_data


class Scan(torch.autograd.Function):
    """Returns out = q S + within fresh with fresh = new - read S, [chunks, H, size, V].

    S is the state before a chunk: 0 at the start of a sequence, then kept S + k^T fresh of the chunk before.
    q, read, k [chunks, H, size, K], within [chunks, H, size, size], new [chunks, H, size, V], kept
    [chunks, H, 1, 1]. steps: as Chunks.steps. One step computes a chunk of every sequence; the products that
    need no state of the step before are computed for all chunks together.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        read: Tensor,
        k: Tensor,
        within: Tensor,
        new: Tensor,
        kept: Tensor,
        steps: Sequence[Tensor],
    ) -> Tensor:
        states = new.new_empty(*k.shape[:2], k.shape[-1], new.shape[-1])
        fresh = torch.empty_like(new)
        if has_data(new):
            state = states.new_zeros(len(steps[0]), *states.shape[1:])
            for at in steps:
                state = state[: len(at)]  # of the sequences that are long enough
                states[at] = state
                fresh[at] = one = new[at] - read[at] @ state
                state = state * kept[at] + k[at].mT @ one
        else:  # a plan: the same sizes and FLOP without a step per chunk
            fresh = new - read @ states
            k.mT @ fresh
        ctx.save_for_backward(q, read, k, within, kept, states, fresh)
        ctx.steps = steps
        return q @ states + within @ fresh

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, read, k, within, kept, states, fresh = ctx.saved_tensors
        of_fresh, direct = within.mT @ gradient, q.mT @ gradient
        after = torch.zeros_like(states)  # gradient of the state after each chunk
        if has_data(gradient):
            of_state = after.new_zeros(0, *after.shape[1:])
            for at in reversed(ctx.steps):
                missing = len(at) - len(of_state)  # sequences of which this is the last chunk
                of_state = torch.cat([of_state, after.new_zeros(missing, *after.shape[1:])])
                after[at] = of_state
                of_fresh[at] = one = of_fresh[at] + k[at] @ of_state
                of_state = direct[at] + of_state * kept[at] - read[at].mT @ one
        else:
            of_fresh = of_fresh + k @ after
            read.mT @ of_fresh
        return (
            gradient @ states.mT,
            -of_fresh @ states.mT,
            fresh @ after.mT,
            gradient @ fresh.mT,
            of_fresh,
            (states * after).sum((-2, -1), keepdim=True),
            None,
        )
