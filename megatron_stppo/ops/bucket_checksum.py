"""64-bit checksums of many tensors in one call, to compare the result of a reshard with its source."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_stppo.ops import extension
from megatron_stppo.ops.bucket_copy import cut, expressible
from megatron_stppo.ops.extension import has_data

PIECE = 2048  # CHECKSUM_PIECE of csrc/bucket_checksum.h
MASK = (1 << 32) - 1
AT_ONCE = 512 * PIECE  # numbers that the torch fallback widens to 8 bytes at a time


@torch.no_grad()
def checksum(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a 0-d int64 checksum of the tensor's bits after a cast to `dtype`.

    The bits are read as signed 16-bit numbers x_i (8-bit for types of one byte), in the order of the
    elements' indices. The checksum holds two sums mod 2^32. The low half is
    bytes + sum_i x_i * first(i mod PIECE) * first(i div PIECE), where bytes is the tensor's size in bytes.
    The high half is the same with other weights and without the bytes. All weights are odd, so changing one
    number always changes both sums. Exchanging two unequal numbers goes unnoticed only if both of their
    weights agree, which happens once in 2^28. Strides do not matter.
    """
    if not has_data(tensor):
        return tensor.new_empty((), dtype=torch.int64)
    plain = torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device=tensor.device)
    flat = plain.copy_(tensor).view(-1)
    numbers = flat if flat.itemsize == 1 else flat.view(torch.int16)
    of_number, total = _number_weights(flat.device), torch.zeros(2, dtype=torch.int64, device=flat.device)
    for first in range(0, len(numbers), AT_ONCE):
        wide = numbers[first : first + AT_ONCE].to(torch.int64)
        rows = torch.nn.functional.pad(wide, (0, -len(wide) % PIECE)).view(-1, PIECE)
        bits = _mixed(torch.arange(len(rows), device=flat.device) + (PIECE + 1 + first // PIECE))
        of_piece = torch.stack([bits & MASK, _shifted(bits, 32)]) | 1
        total += ((rows * of_number[:, None]).sum(-1) * of_piece).sum(-1)
    return ((total[0] + plain.nbytes) & MASK) | (total[1] << 32)


class BucketChecksum:
    """Checksums of a fixed list of tensors, to be computed many times.

    The constructor describes the tensors to the kernels; a call launches one kernel per pair of types.
    dtypes[i]: the type that tensors[i] is cast to before it is summed.
    The kernels support float32 and bfloat16 tensors of one or two dimensions whose innermost dimension is
    contiguous. Other tensors use the torch fallback.
    The tensors' addresses are read in the constructor, so their storage must not move afterwards.
    """

    def __init__(self, tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> None:
        self._pairs = [(t.detach(), dtype) for t, dtype in zip(tensors, dtypes, strict=True)]  # kept alive
        self._device = tensors[0].device if tensors else torch.device("cpu")
        self._tables = self._described()

    def __call__(self) -> Tensor:
        """Return the `checksum` of each tensor, int64 [tensors]."""
        sums = torch.zeros(len(self._pairs), dtype=torch.int64, device=self._device)
        if extension.applies(sums):
            tables, others = self._tables
            for kind, slices, owners in tables if has_data(sums) else ():
                counts = slices, len(slices), owners, len(owners)
                counters = extension.tickets(sums.device, 3 * len(slices))
                extension.run("bucket_checksum", sums.device, *counts, *kind, sums, counters)
        else:
            others = list(enumerate(self._pairs))
        for place, pair in others:
            sums.select(0, place).add_(checksum(*pair))
        return sums

    def _described(
        self,
    ) -> tuple[list[tuple[tuple[int, int], Tensor, Tensor]], list[tuple[int, tuple[Tensor, torch.dtype]]]]:
        """Return ([(types, *records of csrc)], [(place, pair that csrc does not support)])."""
        records: dict[tuple[int, int], list[list[int]]] = {}
        others = []
        for place, (tensor, dtype) in enumerate(self._pairs):
            if not expressible(tensor) or dtype not in extension.DTYPES:
                others.append((place, (tensor, dtype)))
            elif tensor.numel():
                kind = extension.DTYPES[tensor.dtype], extension.DTYPES[dtype]
                records.setdefault(kind, []).append([*_rows(tensor), place])
        tables = []
        for kind, rows in records.items():
            sizes = [rows_of * width for _, rows_of, width, *_ in rows]
            piece = extension.CHECKSUM_BLOCK // (2 if kind[1] == extension.FLOAT32 else 1)
            tables.append((kind, *cut(rows, sizes, piece, self._device)))
        return tables, others


def _rows(tensor: Tensor) -> list[int]:
    """Return address, rows, width and stride in elements; a contiguous tensor is one row."""
    if tensor.dim() == 1 or tensor.is_contiguous():
        return [extension.pointer(tensor), 1, tensor.numel(), 0]
    return [extension.pointer(tensor), *tensor.shape, tensor.stride(0)]


@functools.cache
def _number_weights(device: torch.device) -> Tensor:
    bits = _mixed(torch.arange(1, PIECE + 1, device=device))
    return (torch.stack([bits, _shifted(bits, 16)]) & 0x7FFF) | 1


def _mixed(z: Tensor) -> Tensor:
    """Return `mixed` of csrc/bucket_checksum.h, in int64: products wrap, and >> is made logical by a mask."""
    z = (z ^ _shifted(z, 30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    z = (z ^ _shifted(z, 27)) * (0x94D049BB133111EB - (1 << 64))
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)
