"""Determines which tokens of a packed sequence a context-parallel rank holds.

With C ranks, a sequence is cut into 2 C equal pieces. Rank r holds pieces r and 2 C - 1 - r, an early and a
late one, so that causal attention has the same cost on every rank. megatron's rotary embedding and
TransformerEngine's attention expect this order for packed sequences.
"""

import torch
from torch import Tensor


def padded_lengths(lengths: Tensor, size: int, multiple: int, least: int = 1) -> Tensor:
    """Return the padded lengths of sequences, given their lengths [n].

    With size > 1 ranks, each length is rounded up to a multiple of 2 * size. If needed, a sequence of dummy
    tokens is appended, so that every rank's share is a multiple of `multiple` and at least `least`.
    Example: [3, 6] with size=2, multiple=1 becomes [4, 8]; with size=1, multiple=4 it becomes [3, 6, 3].
    """
    unit = 2 * size if size > 1 else 1
    padded = -(-lengths // unit) * unit
    share, dummy = int(padded.sum()) // size, 0
    while share < least or share % multiple:
        share, dummy = share + unit // size, dummy + 1
    return torch.cat([padded, torch.tensor([dummy * unit])]) if dummy else padded


def share(padded: Tensor, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Return (mine, local). mine: positions of the packed tokens that `rank` holds, in its order. local: for
    every packed token its index in `mine`, or -1 if another rank holds it.

    Example: for one sequence of 8 tokens, rank 1 of 2 has [2, 3, 4, 5] and [-1, -1, 0, 1, 2, 3, -1, -1].
    """
    total = int(padded.sum())
    if size == 1:
        everything = torch.arange(total)
        return everything, everything
    piece = torch.repeat_interleave(padded // (2 * size), padded)  # length of each token's piece
    start = torch.repeat_interleave(padded.cumsum(0) - padded, padded)
    number = (torch.arange(total) - start) // piece
    mine = torch.nonzero((number == rank) | (number == 2 * size - 1 - rank)).squeeze(1)
    local = torch.full((total,), -1)
    local[mine] = torch.arange(len(mine))
    return mine, local


def attended(padded: Tensor, rank: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the attention of the pieces of `rank`: (query lengths [m], key lengths [m], keys).

    Pieces are in the order of `share`. A piece attends to its sequence up to its own end. `keys` are the
    indices of those tokens, piece after piece, in the concatenated shares of all ranks.
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
