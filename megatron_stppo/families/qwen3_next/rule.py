"""The gated delta rule over packed sequences, in chunks of tokens.

Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (arXiv 2412.06464). For every head, a state S [K, V] starts
at 0 at the first token of a sequence, and each token changes it and reads it:

    S = exp(g) S;    S = S + k (beta (v - k^T S))^T;    o = q^T S

Within a chunk, the writes of all tokens solve one triangular system (section 3.3 of the paper), so that a
sequence takes one step per chunk instead of one per token. No chunk has tokens of two sequences, and the
chunks with the same number in their sequences are computed together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_stppo.model.attention import Sequences
from megatron_stppo.ops.extension import has_data, to_device

CHUNK = 64  # tokens; other lengths were not faster on a CPU


@dataclass(frozen=True)
class Chunks:
    """How packed sequences are cut into chunks.

    Example: sequences of 3 and 5 tokens in chunks of 4 make 3 chunks, the first and the last of which have
    empty places: place is [0, 1, 2, 4, 5, 6, 7, 8], and steps are [0, 1] and [2].
    """

    size: int
    count: int
    place: Tensor  # int64 [P]: the place of each token among the `count * size` places
    steps: tuple[Tensor, ...]  # int64: the chunks of each step, of the longest sequence first

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device, size: int = CHUNK) -> Chunks:
        """lengths: tokens of the sequences, which are packed one after another."""
        tokens = torch.tensor(lengths, dtype=torch.int64)
        each = (tokens + size - 1) // size
        first = each.cumsum(0) - each
        gaps = first * size - (tokens.cumsum(0) - tokens)
        place = torch.arange(int(tokens.sum())) + gaps.repeat_interleave(tokens)
        order = each.argsort(descending=True, stable=True)  # so that the sequences of a step are the first
        each, first = each[order], first[order]
        steps = [first[each > step] + step for step in range(int(each.max()) if len(each) else 0)]
        moved = to_device(torch.cat([place, *steps]), device).split([len(place), *map(len, steps)])
        return cls(size, int(each.sum()), moved[0], tuple(moved[1:]))

    @classmethod
    def of_pack(cls, sequences: Sequences) -> Chunks:
        return cls.of(sequences.lengths, sequences.position_P.device)

    def spread(self, x: Tensor) -> Tensor:
        """Return x [P, H, ...] as [chunks, H, size, ...], with zeros at empty places."""
        empty = x.new_zeros(self.count * self.size, *x.shape[1:])
        return empty.index_copy(0, self.place, x).unflatten(0, (self.count, self.size)).transpose(1, 2)

    def packed(self, x: Tensor) -> Tensor:
        """Undo `spread`."""
        return x.transpose(1, 2).flatten(0, 1).index_select(0, self.place)


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
                fresh[at] = written = new[at] - read[at] @ state
                state = state * kept[at] + k[at].mT @ written
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
                of_fresh[at] = of_written = of_fresh[at] + k[at] @ of_state
                of_state = direct[at] + of_state * kept[at] - read[at].mT @ of_written
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


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunks: Chunks) -> Tensor:
    """Return o [P, H, V].

    q, k [P, H, K], v [P, H, V], g (the logarithm of the decay) and beta [P, H], all of one type; the state
    has this type too. chunks: those of the sequences.
    """
    q, k, v, g, beta = (chunks.spread(x) for x in (q, k, v, g, beta))
    g = g.cumsum(-1)
    above = torch.ones(chunks.size, chunks.size, dtype=torch.bool, device=g.device).triu(1)
    decay = (g[..., :, None] - g[..., None, :]).masked_fill(above, -torch.inf).exp()
    written = k * beta[..., None]
    right = torch.cat([v * beta[..., None], written * g.exp()[..., None]], -1)
    left = written @ k.mT * decay
    solved = torch.linalg.solve_triangular(left, right, upper=False, unitriangular=True)
    new, read = solved.split([v.shape[-1], k.shape[-1]], -1)
    within = q @ k.mT * decay
    last = g[..., -1:]
    q, k, kept = q * g.exp()[..., None], k * (last - g).exp()[..., None], last.exp()[..., None]
    return chunks.packed(Scan.apply(q, read, k, within, new, kept, chunks.steps))  # type: ignore[no-untyped-call]
