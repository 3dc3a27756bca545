"""Simulation of any rank of any world size in one process, with torch's "fake" process group.

The fake groups have ranks and sizes but transfer no data. megatron builds the same modules as on the real
rank.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore  # importing it registers the backend

from megatron_stppo.config import Config
from megatron_stppo.parallel import groups
from megatron_stppo.parallel.groups import MeshRank
from megatron_stppo.parallel.layout import Layout
from megatron_stppo.sharding.tiles import Spans


@dataclass(frozen=True)
class Kind:
    """A set of ranks that build the same modules."""

    rank: int  # the lowest of them
    stages: Mapping[int, int]  # {pipeline stage: number of these ranks on it}


@contextlib.contextmanager
def standing_at(rank: int, world: int, config: Config) -> Iterator[MeshRank]:
    """Initialise this process as `rank` of `world` ranks inside the context, and yield its MeshRank."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield groups.initialize(config.parallel)
    finally:
        parallel_state.destroy_model_parallel()  # megatron's modules read its global groups
        dist.destroy_process_group()


def kinds(layout: Layout, training: Mapping[int, Spans]) -> list[Kind]:
    """Group the ranks by the shapes of their shards.

    Ranks with equal shapes build the same modules, so only one rank of each kind is measured.
    Example: 16 ranks on 4 equal stages make three kinds: the stage with the embedding, the stage with the
    head, and the two stages in between.
    """
    found: dict[object, list[int]] = {}
    for rank, spans in training.items():
        sizes = tuple((name, parts[-1].local + parts[-1].size) for name, parts in spans.items())
        found.setdefault(sizes, []).append(rank)
    return [
        Kind(ranks[0], Counter(layout.coordinates(rank).pipeline for rank in ranks))
        for ranks in found.values()
    ]
