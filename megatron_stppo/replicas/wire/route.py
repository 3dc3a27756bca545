"""Between whom weights are sent, over a process group of two programs, and how its ranks learn of a loss."""

from __future__ import annotations

import contextlib
from collections.abc import Collection

import msgspec
import torch.distributed as dist

from megatron_stppo.parallel.layout import Layout
from megatron_stppo.weights.sharding.hf_names import ModelShape
from megatron_stppo.weights.sharding.parts import LayerSpec
from megatron_stppo.weights.sharding.spans import serving_layouts, training_layouts
from megatron_stppo.weights.sharding.tiles import Spans


class Trained(msgspec.Struct, frozen=True):
    """How the trainer's ranks hold the weights."""

    layout: Layout
    spec: LayerSpec


class Route(msgspec.Struct, frozen=True):
    """The process group over which weights go from the trainer, or from one replica, to another replica.

    The sender's ranks come first in the group; the receiver's ranks follow.
    Example: Route("weights-2", "10.0.0.1", 4711, 8, 2, ("replica-1", "replica-2")) joins a replica of 8 ranks
    with one of 2.
    """

    name: str  # never used twice on the store
    host: str  # of the store
    port: int
    source: Trained | int  # of the trainer; or the ranks of a replica
    tensor: int  # ranks of the receiver
    ends: tuple[str, ...]  # the replicas at its ends, by the name under which their loss is told

    @property
    def senders(self) -> int:
        """The number of the sender's ranks."""
        return self.source if isinstance(self.source, int) else self.source.layout.world


def layouts_of(shape: ModelShape, route: Route) -> tuple[dict[int, Spans], dict[int, Spans]]:
    """Return the layouts of the sender's and of the receiver's ranks, by group rank.

    Example: if a trainer of 2 ranks sends to a replica of tensor=2, the replica's ranks are 2 and 3.
    """
    first, source = route.senders, route.source
    if isinstance(source, int):
        sources = serving_layouts(shape, source, source)
    else:
        sources = training_layouts(shape, source.layout, spec=source.spec)
    receiver = serving_layouts(shape, route.tensor, route.tensor)
    return sources, {first + rank: spans for rank, spans in receiver.items()}


def tell_lost(store: dist.Store, name: str, why: str) -> None:
    """Make each rank raise an error that is in a method of a link of this name, or of a replica of this name,
    or enters one.

    Any thread may call it, with a connection to the store in which no other thread waits.
    """
    with contextlib.suppress(RuntimeError, OSError):  # the store ends with the trainer
        store.set(f"lost/{name}", why)


def why_lost(store: dist.Store, names: Collection[str]) -> str:
    """Return the reason that tell_lost() was given for the first of these names that has one, or "". It does
    not wait."""
    try:
        keys = [key for key in (f"lost/{name}" for name in names) if store.check([key])]
        return store.get(keys[0]).decode(errors="replace") if keys else ""
    except (RuntimeError, OSError) as error:
        return f"the trainer's store is gone: {error}"
