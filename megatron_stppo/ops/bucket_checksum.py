"""One 64-bit sum per tensor, of many in one call: whether what a reshard wrote is what its source held."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_stppo.ops import extension
from megatron_stppo.ops.bucket_copy import expressible, on_device

PIECE = 2048  # CHECKSUM_PIECE of csrc/bucket_checksum.h
MASK = (1 << 32) - 1
AT_ONCE = 512 * PIECE  # numbers that the twin widens to 8 bytes at a time


@torch.no_grad()
def checksum(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A 0-d int64 sum of the tensor's bits, as they are after a cast to `dtype`, that depends on their order.

    With the bits as signed 16-bit numbers x_i, in the order of the elements' indices, it holds two sums mod
    2^32: in its low half bytes + sum_i x_i * first(i mod PIECE) * first(i div PIECE), in its high the same
    with other weights and without the bytes. All weights are odd, so changing one number always changes both;
    exchanging two unequal ones changes neither only where both weights agree, once in 2^28. How the tensor
    lies in memory does not matter.
    """
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
    """The checksums of the same tensors again and again: described once, one kernel per pair of types a call.

    dtypes[i]: the type that tensors[i] is cast to before it is summed. Tensors that csrc/ does not know (of
    other types than float32 and bfloat16, or not contiguous in the last of one or two dimensions) are summed
    in plain torch. The tensors' addresses are taken now: give tensors whose storage stays where it is.
    """

    def __init__(self, tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> None:
        self._pairs = [(t.detach(), dtype) for t, dtype in zip(tensors, dtypes, strict=True)]  # kept alive
        self._device = tensors[0].device if tensors else torch.device("cpu")
        self._tables = self._described(range(len(self._pairs)))

    def __call__(self, chosen: Sequence[int] | None = None) -> Tensor:
        """int64 [chosen]: `checksum` of the chosen tensors; None: of all, which needs no new description."""
        wanted = range(len(self._pairs)) if chosen is None else chosen
        sums = torch.zeros(len(wanted), dtype=torch.int64, device=self._device)
        if extension.serves(self._device):
            tables, others = self._tables if chosen is None else self._described(chosen)
            for kind, table in tables:
                extension.run("bucket_checksum", self._device, table, len(table), *kind, sums)
        else:
            others = [(place, self._pairs[index]) for place, index in enumerate(wanted)]
        for place, pair in others:
            sums[place] = checksum(*pair)
        return sums

    def _described(
        self, chosen: Sequence[int]
    ) -> tuple[list[tuple[tuple[int, int], Tensor]], list[tuple[int, tuple[Tensor, torch.dtype]]]]:
        """([(types, csrc's records)], [(place, what csrc does not know)])."""
        records: dict[tuple[int, int], list[list[int]]] = {}
        others = []
        for place, index in enumerate(chosen):
            tensor, dtype = self._pairs[index]
            if not expressible(tensor) or dtype not in extension.DTYPES:
                others.append((place, (tensor, dtype)))
            elif tensor.numel():
                kind = extension.DTYPES[tensor.dtype], extension.DTYPES[dtype]
                records.setdefault(kind, []).append([*_rows(tensor), place])
        return [(kind, on_device(rows, self._device)) for kind, rows in records.items()], others


def _rows(tensor: Tensor) -> list[int]:
    """Address, rows, width, stride in elements; a tensor without gaps is one row."""
    if tensor.dim() == 1 or tensor.is_contiguous():
        return [tensor.data_ptr(), 1, tensor.numel(), 0]
    return [tensor.data_ptr(), *tensor.shape, tensor.stride(0)]


@functools.cache
def _number_weights(device: torch.device) -> Tensor:
    bits = _mixed(torch.arange(1, PIECE + 1, device=device))
    return (torch.stack([bits, _shifted(bits, 16)]) & 0x7FFF) | 1


def _mixed(z: Tensor) -> Tensor:
    """`mixed` of csrc/bucket_checksum.h. int64 products wrap; the sign bits that >> repeats are masked."""
    z = (z ^ _shifted(z, 30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    z = (z ^ _shifted(z, 27)) * (0x94D049BB133111EB - (1 << 64))
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)
