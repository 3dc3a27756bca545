"""The process groups of one run: megatron's own, and this rank's place in them."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_stppo.parallel.layout import Layout


@dataclass(frozen=True)
class Place:
    """Where this rank stands. Example: rank 3 of 4 with tensor=2, pipeline=2 is tensor rank 1, pipeline rank
    1."""

    rank: int
    world: int
    tensor_rank: int
    tensor_size: int
    pipeline_rank: int
    pipeline_size: int
    data_rank: int
    data_size: int

    @property
    def layout(self) -> Layout:
        return Layout(self.tensor_size, self.pipeline_size, self.data_size)

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline_rank == self.pipeline_size - 1

    @property
    def tensor_group(self) -> dist.ProcessGroup:
        return parallel_state.get_tensor_model_parallel_group()

    @property
    def pipeline_group(self) -> dist.ProcessGroup:
        return parallel_state.get_pipeline_model_parallel_group()

    @property
    def data_group(self) -> dist.ProcessGroup:
        return parallel_state.get_data_parallel_group()


def initialize(tensor: int, pipeline: int) -> Place:
    """Splits the default process group into megatron's groups; once per process."""
    parallel_state.initialize_model_parallel(tensor, pipeline)
    return place()


def place() -> Place:
    ps = parallel_state
    return Place(
        rank=dist.get_rank(),
        world=dist.get_world_size(),
        tensor_rank=ps.get_tensor_model_parallel_rank(),
        tensor_size=ps.get_tensor_model_parallel_world_size(),
        pipeline_rank=ps.get_pipeline_model_parallel_rank(),
        pipeline_size=ps.get_pipeline_model_parallel_world_size(),
        data_rank=ps.get_data_parallel_rank(),
        data_size=ps.get_data_parallel_world_size(),
    )
