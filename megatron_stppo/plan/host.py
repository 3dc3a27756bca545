"""The size of a checkpoint on disk, and the host memory of a node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_stppo.config import Config
from megatron_stppo.model.offload import MAY_LEAVE
from megatron_stppo.parallel.layout import Layout
from megatron_stppo.plan.phases import StageUse


@dataclass(frozen=True)
class HostUse:
    """Bytes. Memory is that of the node that needs most, without what the programs themselves need."""

    checkpoint: int  # of one step on disk
    copies: int  # the ranks' copies of what they write, while a checkpoint is saved in the background
    offloaded: int  # what update.offload keeps on the host

    @classmethod
    def of(
        cls, config: Config, layout: Layout, stages: Sequence[StageUse], dtype: torch.dtype, per_node: int
    ) -> HostUse:
        """Return the use of a run. stages: by number; per_node: GPUs of a node."""
        world = range(layout.world)
        written = [_written(config, layout, stages, dtype, rank) for rank in world]
        away = [_away(config, stages[layout.coordinates(rank).pipeline]) for rank in world]
        nodes = [world[first : first + per_node] for first in world[::per_node]]
        keeps = config.run.async_checkpoints
        used = [
            (sum(written[rank][1] for rank in node) if keeps else 0, sum(away[rank] for rank in node))
            for node in nodes
        ]
        copies, offloaded = max(used, key=sum)
        return cls(sum(disk for disk, _ in written), copies, offloaded)


def _written(
    config: Config, layout: Layout, stages: Sequence[StageUse], dtype: torch.dtype, rank: int
) -> tuple[int, int]:
    """Return (bytes of the checkpoint on disk that belong to a rank's states, bytes that the rank copies).

    A rank copies its states, and the first of the ranks with the same weights copies these. What all
    tensor-parallel ranks hold (norms, and A or B of an adapter) is written by one of them. Tied embeddings of
    the first and the last pipeline stage are counted twice, but written once.
    """
    at = layout.coordinates(rank)
    number = at.context + layout.context * at.data  # among the ranks with the same weights, except experts
    disk = copied = 0.0
    for role, use in stages[at.pipeline].models.items():
        if not use.optimizer:
            continue
        shares = config.update.optimizer(role).distributed
        own = 1 - use.repeated if at.tensor else 1.0
        first = own if number == 0 else use.experts if number < layout.expert else 0.0
        # Adam's moments, and float32 weights where the model has another type. In float32 the distributed
        # optimizer writes the weights as its own once more.
        in_float32 = dtype == torch.float32
        elements = use.optimizer / (8 if in_float32 else 12) * (own if shares else first)
        states = elements * (8 if in_float32 and not shares else 12)
        disk += states + elements * dtype.itemsize
        copied += states + use.weights * first
    return round(disk), round(copied)


def _away(config: Config, stage: StageUse) -> int:
    """Return the bytes of a rank that the host keeps with update.offload. Gradients are not kept."""
    names = MAY_LEAVE[config.update.offload]
    return (
        sum(use.optimizer for use in stage.models.values() if "optimizer" in names)
        + sum(use.weights for role, use in stage.models.items() if role in names)
        + (stage.trunk if "trunk" in names else 0)
    )
