"""Many strided copies with casts in one call; a reshard packs and unpacks its buffers with them."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_stppo.ops import extension
from megatron_stppo.ops.extension import has_data, to_device

TYPES = tuple(extension.DTYPES)


class BucketCopy:
    """A fixed list of copies targets[i].copy_(sources[i]), to be done many times.

    The constructor describes the tensors to the kernels; a call launches one kernel per pair of types.
    sources, targets: the same number of tensors, all on one device, each float32 or bfloat16, with one or two
    dimensions and a contiguous innermost dimension, as rows or columns [a, b) of a weight have. sources[i]
    and targets[i] have the same shape. No target may share memory with another source or target.
    The tensors' addresses are read in the constructor, so their storage must not move afterwards.
    Autograd records nothing.
    """

    def __init__(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        given = [(s.detach(), t.detach()) for s, t in zip(sources, targets, strict=True)]
        slices: dict[tuple[int, int], list[list[int]]] = {}
        pairs: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
        for source, target in given:
            device = given[0][0].device
            assert source.shape == target.shape and expressible(source) and expressible(target)
            assert source.device == target.device == device
            if source.numel():
                kind = extension.DTYPES[source.dtype], extension.DTYPES[target.dtype]
                slices.setdefault(kind, []).append(_slice(source, target))
                pairs.setdefault(kind, []).append((source, target))
        # (types, tables of csrc, pairs, which are kept alive)
        self._calls = [
            (
                kind,
                cut(rows, [source.numel() for source, _ in pairs[kind]], extension.COPY_PIECE, device),
                pairs[kind],
            )
            for kind, rows in slices.items()
        ]

    @torch.no_grad()
    def __call__(self) -> None:
        """Do the copies. On a GPU they are only enqueued, on the current stream."""
        for kind, (slices, owners), pairs in self._calls:
            if not extension.applies(slices):
                for source, target in pairs:
                    target.copy_(source)
            elif has_data(slices):
                counts = slices, len(slices), owners, len(owners)
                extension.run("bucket_copy", slices.device, *counts, *kind)


def expressible(tensor: Tensor) -> bool:
    """Return whether `BucketCopy` accepts the tensor's type, dimensions and strides."""
    rows = tensor.dim() in (1, 2) and (tensor.stride(-1) == 1 or tensor.shape[-1] == 1)
    return rows and tensor.dtype in TYPES


def _slice(source: Tensor, target: Tensor) -> list[int]:
    """Return csrc's record: two addresses, rows, width, two strides in elements.

    A pair of contiguous tensors becomes one row.
    """
    rows, width = (1, source.numel()) if source.dim() == 1 else source.shape
    strides = [0, 0] if rows == 1 else [source.stride(0), target.stride(0)]
    if strides == [width, width]:
        rows, width, strides = 1, rows * width, [0, 0]
    return [extension.pointer(source), extension.pointer(target), rows, width, *strides]


def cut(
    records: list[list[int]], elements: Sequence[int], piece: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return csrc's records int64 [N, 7] and the owners of the pieces int32 [pieces], both on `device`.

    Slice i has elements[i] elements and is cut into pieces of `piece` elements. One block of a GPU works on
    each piece. A record ends with the number of its slice's first piece. owners[j] is the index of the slice
    that piece j belongs to.
    piece: 0 if the extension is not built. There are no pieces then.

    Example: slices of 10 and 3 elements in pieces of 4 -> first pieces 0 and 3, owners [0, 0, 0, 1]
    """
    counts = [-(-size // piece) if piece else 0 for size in elements]
    first = itertools.accumulate(counts[:-1], initial=0)
    # on the host, whatever torch.set_default_device says: only host memory can be pinned
    with torch.device("cpu"):
        table = torch.tensor([[*record, f] for record, f in zip(records, first, strict=True)])
        index, times = torch.arange(len(counts), dtype=torch.int32), torch.tensor(counts)
        owners = index.repeat_interleave(times, output_size=sum(counts))
    return to_device(table, device), to_device(owners, device)
