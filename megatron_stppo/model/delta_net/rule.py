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

import torch
from torch import Tensor

from megatron_stppo.model.delta_net.scan import Scan
from megatron_stppo.ops.transfer import to_device

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

    def spread(self, x: Tensor) -> Tensor:
        """Return x [P, H, ...] as [chunks, H, size, ...], with zeros at empty places."""
        empty = x.new_zeros(self.count * self.size, *x.shape[1:])
        return empty.index_copy(0, self.place, x).unflatten(0, (self.count, self.size)).transpose(1, 2)

    def packed(self, x: Tensor) -> Tensor:
        """Undo `spread`."""
        return x.transpose(1, 2).flatten(0, 1).index_select(0, self.place)


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
