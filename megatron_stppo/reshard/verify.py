"""Did every row arrive? A checksum per copy, on both sides."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_stppo.reshard.plan import Copy
from megatron_stppo.reshard.staging import cast

BLOCK = 1 << 15  # words that share weights: those stay in a CPU's cache
BLOCKS = 1 << 8  # multiplied at once on a GPU: 64 MB of products; divides BLOCK


class ReshardError(RuntimeError):
    """The engine's weights are not a version of the trainer's; nothing may be generated with them."""


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """A 0-d int64 sum of the tensor's bytes that depends on their order.

    sum_i word_i * weight_i mod 2^64 over 8-byte words, with fixed odd weights. Changing one word always
    changes the sum (an odd weight is invertible); exchanging two does unless their weights agree in all the
    bits that matter. Cheap because it reads words, not elements. The weight of word i of block b is a product
    weight[i] * weight[b].
    """
    data = tensor.contiguous().view(-1).view(torch.uint8)
    size, weight = data.numel(), _weights(data.device)
    if data.storage_offset() % 8:
        data = data.clone()  # a view as int64 must start on a word
    words = (data if size % 8 == 0 else data[: size // 8 * 8]).view(torch.int64)
    blocks = words.numel() // BLOCK
    total = _products(words[blocks * BLOCK :], weight) * weight[blocks % BLOCK] + size
    if size % 8:
        tail = torch.zeros(8, dtype=torch.uint8, device=data.device)
        tail[: size % 8] = data[size // 8 * 8 :]
        total += tail.view(torch.int64)[0] * weight[-1]
    for first in range(0, blocks, BLOCKS):
        rows = words[first * BLOCK : min(first + BLOCKS, blocks) * BLOCK].view(-1, BLOCK)
        total += _products(_products(rows, weight), weight[first % BLOCK :])
    return total


def _products(words: Tensor, weight: Tensor) -> Tensor:
    """[..., n] and [m >= n] -> [...]: sums of products over the last dimension, mod 2^64."""
    weight = weight[: words.shape[-1]]
    if words.is_cuda:
        return (words * weight).sum(-1)  # no product of integer matrices there
    return torch.mv(words, weight) if words.dim() == 2 else torch.dot(words, weight)


@functools.cache
def _weights(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-(2**63), 2**63 - 1, (BLOCK + 1,), generator=generator)
    return (weight | 1).to(device)


class Checks:
    """The copies of one sync that this rank sent, and those it must find in its own tensors.

    Both ends number the copies between a pair of ranks alike; `chosen(number)` says which are summed. A copy
    is summed once as it leaves, after the cast, and once where it ended up, after everything is written.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        world: int,
        device: torch.device,
        chosen: Callable[[int], bool],
    ) -> None:
        self._group, self._device, self._chosen = group, device, chosen
        self._sent: list[list[Tensor | None]] = [[] for _ in range(world)]
        self._due: list[list[tuple[Copy, Tensor]]] = [[] for _ in range(world)]

    def sent(self, copy: Copy, rows: Tensor, dtype: torch.dtype) -> None:
        """`rows`, as they are in `dtype`, left for their target."""
        numbered = self._sent[copy.target_rank]
        chosen = self._chosen(len(numbered))
        numbered.append(checksum(cast(rows, dtype)).to(self._device) if chosen else None)

    def due(self, copy: Copy, view: Tensor) -> None:
        self._due[copy.source_rank].append((copy, view))

    def exchange(self) -> tuple[list[Copy], int, int]:
        """-> (copies that differ on this rank, copies compared, sum of all sums found). Collective."""
        send = [[total for total in totals if total is not None] for totals in self._sent]
        due = [[pair for i, pair in enumerate(pairs) if self._chosen(i)] for pairs in self._due]
        flat = [pair for pairs in due for pair in pairs]
        expected = torch.empty(len(flat), dtype=torch.int64, device=self._device)
        dist.all_to_all_single(
            expected,
            self._stack([total for totals in send for total in totals]),
            [len(pairs) for pairs in due],
            [len(totals) for totals in send],
            group=self._group,
        )
        found = self._stack([checksum(view).to(self._device) for _, view in flat])
        differ = (expected != found).nonzero().flatten().tolist()
        return [flat[i][0] for i in differ], len(flat), int(found.sum())

    def _stack(self, totals: list[Tensor]) -> Tensor:
        return torch.stack(totals) if totals else torch.empty(0, dtype=torch.int64, device=self._device)
