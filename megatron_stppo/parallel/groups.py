"""The process groups of a run, which megatron creates, and this rank's position in them.

megatron's own modules, schedules and optimizers find the groups in megatron.core.parallel_state, which is
global, so this module initialises it. Our code gets the groups from a MeshRank that is passed to it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.pipeline_parallel import p2p_communication as p2p

from megatron_stppo.config import Config, ParallelConfig
from megatron_stppo.parallel.layout import Layout


@dataclass(frozen=True)
class MeshRank:
    """The position of this rank in the device mesh.

    Example: rank 3 of 4 with tensor=2, pipeline=2 is tensor rank 1 and pipeline rank 1.
    """

    rank: int
    world: int
    tensor_rank: int
    tensor_size: int
    context_rank: int
    context_size: int
    pipeline_rank: int
    pipeline_size: int
    data_rank: int
    data_size: int
    layout: Layout

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
    def context_group(self) -> dist.ProcessGroup:
        return parallel_state.get_context_parallel_group()

    @property
    def data_group(self) -> dist.ProcessGroup:
        return parallel_state.get_data_parallel_group()

    @property
    def tensor_and_context_group(self) -> dist.ProcessGroup:
        """The ranks of one pipeline stage that train on the same trajectories."""
        return parallel_state.get_tensor_and_context_parallel_group()

    @property
    def token_group(self) -> dist.ProcessGroup:
        """The ranks among which a batch's tokens are divided: data x context parallel."""
        return parallel_state.get_data_parallel_group(with_context_parallel=True)

    @property
    def tensor_and_token_group(self) -> dist.ProcessGroup:
        """The ranks of one pipeline stage: tensor x data x context parallel."""
        return parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)


def carry_bytes() -> bool:
    """Return whether the process groups can transfer data. In a dry run they only have ranks and sizes."""
    return dist.get_backend() != "fake"


def replace(parallel: ParallelConfig, timeout: timedelta = timedelta(minutes=30)) -> MeshRank:
    """Replace the process groups by those of `parallel`. Models built on the old groups become unusable.

    timeout: see initialize.
    """
    for group in parallel_state._global_process_group_list or ():
        if group is not None:  # megatron lists the default group as None
            dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()
    return initialize(parallel, timeout)


def initialize(parallel: ParallelConfig, timeout: timedelta = timedelta(minutes=30)) -> MeshRank:
    """Split the default process group into megatron's groups. Call it once per process.

    timeout: the timeout of each collective of these groups.
    Raises ConfigError if the number of ranks does not fit the layout.
    """
    layout = Layout.of_world(dist.get_world_size(), parallel)
    parallel_state.initialize_model_parallel(
        layout.tensor,
        layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual if layout.virtual > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        distributed_timeout_minutes=timeout / timedelta(minutes=1),
        create_gloo_process_groups=carry_bytes(),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)  # required by megatron; nothing random uses it
    ps = parallel_state
    return MeshRank(
        rank=dist.get_rank(),
        world=dist.get_world_size(),
        tensor_rank=ps.get_tensor_model_parallel_rank(),
        tensor_size=ps.get_tensor_model_parallel_world_size(),
        context_rank=ps.get_context_parallel_rank(),
        context_size=ps.get_context_parallel_world_size(),
        pipeline_rank=ps.get_pipeline_model_parallel_rank(),
        pipeline_size=ps.get_pipeline_model_parallel_world_size(),
        data_rank=ps.get_data_parallel_rank(),
        data_size=ps.get_data_parallel_world_size(),
        layout=layout,
    )


def exchanges(
    mesh: MeshRank, config: Config, has_experts: bool, tied: bool
) -> list[tuple[dist.ProcessGroup, str]]:
    """Return the groups in which training exchanges tensors on the GPU, in one order on all ranks, and how.

    "sum": reductions and gathers; "swap": each rank sends to each other one; "pass" and "ring": pipeline
    stages send to their neighbours. tied: whether the first and the last stage hold the embedding.
    """
    ps, shared = parallel_state, [one.distributed for one in (config.update.actor, config.update.critic)]
    sums, swaps = [mesh.tensor_group, mesh.context_group, mesh.token_group], []
    sums += [ps.get_intra_distributed_optimizer_instance_group()] * any(shared)  # the norm of the gradients
    sums += [ps.get_model_parallel_group()] * (not all(shared))
    if tied and ps.is_rank_in_embedding_group():
        sums.append(ps.get_embedding_group())
    if has_experts:
        swaps.append(ps.get_expert_model_parallel_group())
        sums += [ps.get_expert_tensor_parallel_group(), ps.get_expert_tensor_and_model_parallel_group()]
        sums += [ps.get_expert_data_parallel_group()]
        sums += [ps.get_expert_tensor_model_pipeline_parallel_group()] * (not all(shared))
        sums += [mesh.tensor_and_context_group] * (config.algorithm.routing_replay != "none")
    between = "ring" if mesh.layout.virtual > 1 else "pass"
    every = {"sum": sums, "swap": swaps, between: [mesh.pipeline_group]}
    return [(group, kind) for kind, some in every.items() for group in some if group.size() > 1]


def connect(found: Iterable[tuple[dist.ProcessGroup, str]], device: torch.device) -> None:
    """Send a few elements through every group of `exchanges`. Collective.

    NCCL takes the memory of a communicator, and of each of its algorithms, at the first use. By then the
    update may have filled torch's cache.
    """
    for group, kind in found:
        one, whole = torch.zeros(1, device=device), torch.zeros(group.size(), device=device)
        if kind == "sum":
            for size in (1, 2**22):  # sums of few elements may take another algorithm
                dist.all_reduce(torch.zeros(size, device=device), group=group)
            dist.all_gather_into_tensor(whole, one, group=group)
            dist.reduce_scatter_tensor(one, whole, group=group)
        elif kind == "swap":
            dist.all_to_all_single(torch.zeros_like(whole), whole, group=group)
        else:
            _pass(group, kind == "ring", device)
    torch.cuda.synchronize()  # an error of a communicator is raised here; does nothing on a CPU
    torch.cuda.empty_cache()  # the engine takes its memory from the driver, not from torch's cache


def _pass(group: dist.ProcessGroup, is_ring: bool, device: torch.device) -> None:
    """Send an element to both neighbours, as megatron does."""
    rank, ranks = group.rank(), dist.get_process_group_ranks(group)
    ends = {"prev": is_ring or rank > 0, "next": is_ring or rank < len(ranks) - 1}
    names = [(f"tensor_{way}_{end}", there) for way in ("send", "recv") for end, there in ends.items()]
    works = (p2p._p2p_ops if is_ring else p2p._batched_p2p_ops)(
        **{name: torch.zeros(1, device=device) if there else None for name, there in names},
        group=group,
        prev_pipeline_rank=ranks[rank - 1],
        next_pipeline_rank=ranks[(rank + 1) % len(ranks)],
    )
    for work in works.values() if isinstance(works, dict) else works:
        work.wait()
