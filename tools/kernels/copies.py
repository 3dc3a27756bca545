"""Benchmarks of the copies in a reshard, from float32 weights to an engine in bfloat16.

Compares bucket_copy with a loop of copy_, and bucket_checksum with its torch fallback.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron_stppo import ops
from tools.kernels.measure import Bench, Row, Variant, implementation

# (slices, rows of each, columns of each, columns of the weight that they are cut from)
Copies = tuple[int, int, int, int]


def copy_rows(bench: Bench, cases: Sequence[Copies], cold: bool) -> Iterator[list[Row]]:
    """Yield the rows of bucket_copy. An element moves 6 bytes: 4 read, 2 written.

    "prepared" is the call of the reshard, which describes the copies once and repeats them.
    """
    for count, rows, columns, width in cases:
        wide = [torch.randn(rows, width, device=bench.device) for _ in range(count)]
        sources = [x[:, width - columns :] for x in wide]
        targets = [torch.empty(rows, columns, dtype=torch.bfloat16, device=bench.device) for _ in sources]
        cut = "" if columns == width else f" of {width:,}"
        elements = count * rows * columns
        size = f"{count:,} x [{rows:,}, {columns:,}{cut}]"
        yield bench.rows("bucket_copy", size, elements, 6 * elements, copy_variants(sources, targets), cold)
        for what, tensors, read in (("as cast", sources, 4), ("as written", targets, 2)):
            summed = checksum_variants(tensors)
            yield bench.rows("bucket_checksum", f"{size} {what}", elements, read * elements, summed, cold)


def copy_variants(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> list[Variant]:
    prepared = ops.BucketCopy(sources, targets)

    def fused(_: None) -> Sequence[Tensor]:
        with implementation("extension"):
            prepared()
        return targets

    def anew(_: None) -> Sequence[Tensor]:
        with implementation("extension"):
            ops.BucketCopy(sources, targets)()
        return targets

    def loop(_: None) -> Sequence[Tensor]:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)
        return targets

    reference = [source.bfloat16().double() for source in sources]
    return [
        Variant("fused, prepared", fused, reference=reference, ours=True),
        Variant("fused, prepared on every call", anew, reference=reference, ours=True),
        Variant("copy_ loop", loop, reference=reference),
    ]


def checksum_variants(tensors: Sequence[Tensor]) -> list[Variant]:
    """Return the variants of bucket_checksum: checksums of the bits of every tensor as bfloat16.

    The variant "fallback" is the one in torch, one tensor after another.
    """
    prepared = ops.BucketChecksum(tensors, [torch.bfloat16] * len(tensors))

    def fused(_: None) -> list[Tensor]:
        with implementation("extension"):
            return [prepared()]

    def fallback(_: None) -> list[Tensor]:
        return [torch.stack([ops.checksum(tensor, torch.bfloat16) for tensor in tensors])]

    return [Variant("fused, prepared", fused, ours=True), Variant("fallback", fallback, ours=True)]
