"""A cluster without a cluster: any rank of any world, in one process, over torch's "fake" process group.

Groups have ranks and sizes and carry nothing, so megatron builds the modules that the rank would build.
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
    """Ranks that build the same modules."""

    rank: int  # the first of them
    stages: Mapping[int, int]  # {pipeline stage: how many of its ranks}


@contextlib.contextmanager
def standing_at(rank: int, world: int, config: Config) -> Iterator[MeshRank]:
    """This process as `rank` of `world`."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield groups.initialize(config.parallel)
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def kinds(layout: Layout, training: Mapping[int, Spans]) -> list[Kind]:
    """Ranks whose shards have the same shapes build the same modules: one of them stands for all.

    Example: 16 ranks of 4 equal stages make three kinds: with the embedding, with the head, and the two
    stages in between.
    """
    found: dict[object, list[int]] = {}
    for rank, spans in training.items():
        sizes = tuple((name, parts[-1].local + parts[-1].size) for name, parts in spans.items())
        found.setdefault(sizes, []).append(rank)
    return [
        Kind(ranks[0], Counter(layout.coordinates(rank).pipeline for rank in ranks))
        for ranks in found.values()
    ]
