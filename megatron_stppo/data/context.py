"""Which tokens of a packed sequence a context-parallel rank holds.

A sequence is cut into 2 C equal pieces for C ranks; rank r holds pieces r and 2 C - 1 - r, an early and a
late one, so that causal attention costs every rank the same. It is the order that megatron's rotary embedding
and TransformerEngine's attention expect of packed sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor


def padded_lengths(lengths: Tensor, size: int, multiple: int, least: int = 1) -> Tensor:
    """Lengths [n] rounded up so that each has 2 `size` pieces, and where needed a last one of dummy tokens,
    which makes every rank's share a multiple of `multiple` and at least `least`.

    Example: [3, 6] for 2 ranks and a multiple of 1 become [4, 8]; for 1 rank and a multiple of 4: [3, 6, 3].
    """
    unit = 2 * size if size > 1 else 1
    padded = -(-lengths // unit) * unit
    share, dummy = int(padded.sum()) // size, 0
    while share < least or share % multiple:
        share, dummy = share + unit // size, dummy + 1
    return torch.cat([padded, torch.tensor([dummy * unit])]) if dummy else padded


def share(padded: Tensor, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """(mine, local): positions of the packed tokens that `rank` holds, in its order; and for every packed
    token its place in that order, -1 where another rank holds it.

    Example: one sequence of 8 for rank 1 of 2: [2, 3, 4, 5] and [-1, -1, 0, 1, 2, 3, -1, -1].
    """
    total = int(padded.sum())
    if size == 1:
        everything = torch.arange(total)
        return everything, everything
    piece = torch.repeat_interleave(padded // (2 * size), padded)  # length of the pieces a token is cut into
    start = torch.repeat_interleave(padded.cumsum(0) - padded, padded)
    number = (torch.arange(total) - start) // piece
    mine = torch.nonzero((number == rank) | (number == 2 * size - 1 - rank)).squeeze(1)
    local = torch.full((total,), -1)
    local[mine] = torch.arange(len(mine))
    return mine, local


def attended(padded: Tensor, rank: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """What the pieces of `rank` attend to: (query lengths [m], key lengths [m], keys).

    Pieces follow one another as `share` orders them. A piece attends to the sequence up to its own end:
    `keys` are the places of those tokens, piece after piece, in the shares of all ranks laid end to end.
    """
    if size == 1:
        return padded, padded, torch.arange(int(padded.sum()))
    width = int(padded.sum()) // size
    where = torch.empty(int(padded.sum()), dtype=torch.int64)
    for other in range(size):
        where[share(padded, other, size)[0]] = other * width + torch.arange(width)
    queries, lengths, keys = [], [], []
    for start, length in zip((padded.cumsum(0) - padded).tolist(), padded.tolist(), strict=True):
        piece = length // (2 * size)
        for number in (rank, 2 * size - 1 - rank):
            queries.append(piece)
            lengths.append((number + 1) * piece)
            keys.append(where[start : start + lengths[-1]])
    return torch.tensor(queries), torch.tensor(lengths), torch.cat(keys)
