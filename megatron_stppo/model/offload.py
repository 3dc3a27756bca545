"""Offloads the memory that a phase of training does not need from the device to the host.

While the engine generates, the optimizer's states can be kept on the host, and gradients need no memory at
all. With `update.offload: all`, weights are also kept on the host in phases that do not use them. An
offloaded tensor remains the same object: only its storage is emptied, and later filled again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron_stppo.model.optimizer import Trainer

Phase = Literal["rollout", "reshard", "score", "update", "checkpoint"]
Offload = Literal["none", "optimizer", "all"]

NEEDED: dict[Phase, tuple[str, ...]] = {
    "rollout": (),
    "reshard": ("trunk", "actor"),
    "score": ("trunk", "actor", "critic", "reference"),
    "update": ("trunk", "actor", "critic", "optimizer", "gradients"),
    "checkpoint": ("actor", "critic", "optimizer"),
}
MAY_LEAVE: dict[Offload, tuple[str, ...]] = {
    "none": (),
    "optimizer": ("optimizer", "gradients"),
    "all": ("optimizer", "gradients", "trunk", "actor", "critic", "reference"),
}


Tensors = Callable[[], Iterable[Tensor]]
# Bytes of the largest and the smallest block of host memory. Powers of two, because torch rounds each
# allocation of pinned memory up to one.
LARGEST, SMALLEST = 1 << 30, 1 << 20


class Storages:
    """The storages of some tensors, which are either on the device or offloaded to the host.

    tensors: returns the tensors; called before each offload, because loading a checkpoint may replace them.
    besides: returns tensors whose storages stay on the device, even if some of `tensors` are views of them.
    keep: if False, the contents are not copied, and the storages are zero when they come back.
    """

    def __init__(self, tensors: Tensors, *, besides: Tensors = tuple, keep: bool = True) -> None:
        self._tensors, self._besides, self._keep = tensors, besides, keep
        self._storages: list[torch.UntypedStorage] = []
        self._sizes: list[int] = []
        self._blocks: list[Tensor] = []  # on the host
        self.here = True

    def find(self) -> list[torch.UntypedStorage]:
        """Return the storages to move, each once."""
        staying = {tensor.untyped_storage()._cdata for tensor in self._besides()}
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in self._tensors()}
        return [storage for key, storage in storages.items() if key not in staying]

    def leave(self) -> None:
        """Offload the storages to the host and free their device memory."""
        if not self.here:
            return
        self.here, self._storages = False, self.find()
        self._sizes = [storage.nbytes() for storage in self._storages]
        if self._keep:
            sizes, pinned = block_sizes(sum(self._sizes)), torch.cuda.is_available()
            if [len(block) for block in self._blocks] != sizes:
                self._blocks = []  # frees them before others are allocated
                self._blocks = [torch.empty(n, dtype=torch.uint8, pin_memory=pinned) for n in sizes]
            for there, host in self._pieces():
                host.copy_(there, non_blocking=True)
            if any(storage.device.type == "cuda" for storage in self._storages):
                torch.cuda.synchronize()
        for storage in self._storages:
            storage.resize_(0)

    def come(self) -> None:
        """Allocate the storages on the device again and restore their contents."""
        if self.here:
            return
        self.here = True
        for storage, size in zip(self._storages, self._sizes, strict=True):
            storage.resize_(size)
            if not self._keep:
                _bytes(storage).zero_()
        if self._keep:
            for there, host in self._pieces():
                there.copy_(host, non_blocking=True)

    def _pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (bytes of a storage, as many bytes of a block), in order, until all storages are covered."""
        blocks = iter(self._blocks)
        host = torch.empty(0, dtype=torch.uint8)
        for there in map(_bytes, self._storages):
            while len(there):
                host = host if len(host) else next(blocks)
                count = min(len(there), len(host))
                yield there[:count], host[:count]
                there, host = there[count:], host[count:]


def block_sizes(total: int) -> list[int]:
    """Return sizes of blocks that hold `total` bytes: powers of two from LARGEST to SMALLEST, in this order.

    Example: 2.5 GiB and 1 byte need blocks of 1 GiB, 1 GiB, 512 MiB and 1 MiB.
    """
    sizes, left = [], total
    while left > 0:
        sizes.append(max(SMALLEST, min(LARGEST, 1 << (left.bit_length() - 1))))
        left -= sizes[-1]
    return sizes


class Offloader:
    """Offloads what a phase does not need, and brings back what it needs.

    Example: Offloader({"actor": trainer}, None, "optimizer").to("rollout") offloads the optimizer's states
    and the gradients, and leaves the actor's weights on the device.
    """

    def __init__(
        self,
        trainers: Mapping[str, Trainer],
        reference: Sequence[torch.nn.Module] | None,
        offload: Offload,
        trunk: Tensors = tuple,
    ) -> None:
        """trunk: returns the weights that several models share, which move together."""
        every = tuple(trainers.values())
        groups = {
            role: Storages(partial(_weights, trainer.chunks), besides=trunk)
            for role, trainer in trainers.items()
        }
        groups["trunk"] = Storages(trunk)
        if reference is not None:
            groups["reference"] = Storages(partial(_weights, reference), besides=trunk)
        # In float32 the optimizer's parameters are the model's weights themselves, which this group excludes.
        groups["optimizer"] = Storages(
            lambda: (x for trainer in every for x in trainer.states()),
            besides=lambda: (x for trainer in every for x in _weights(trainer.chunks)),
        )
        groups["gradients"] = Storages(
            lambda: (x for trainer in every for x in trainer.gradient_buffers()), keep=False
        )
        self._groups = {name: group for name, group in groups.items() if name in MAY_LEAVE[offload]}

    def to(self, phase: Phase) -> None:
        """Move memory for `phase`. On a GPU the copies are enqueued on the current stream."""
        wanted = NEEDED[phase]
        left = [group for name, group in self._groups.items() if name not in wanted and group.here]
        for group in left:
            group.leave()
        if left:
            torch.cuda.empty_cache()  # others allocate from the driver, not from torch's cache
        for name in wanted:
            if name in self._groups:
                self._groups[name].come()


def _weights(model: Sequence[torch.nn.Module]) -> Iterable[Tensor]:
    return (parameter for chunk in model for parameter in chunk.parameters())


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
