"""A process group of two programs, each of which has a default process group of its own.

torch's new_group makes groups of ranks of one default group only. This module builds the group from its parts
and registers it, so that torch.distributed's functions work with it. If one program dies, the group's
collectives raise in the other program, whose own groups still work. It uses private parts of torch 2.13
(distributed_c10d.py): `_register_pg_in_world`, `_abort_process_group` and the constructors of the backends.
"""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

GLOO: Any = dist.ProcessGroupGloo  # Any: its stubs lack _Options
NCCL: Any = getattr(dist, "ProcessGroupNCCL", None)  # torch for CPUs does not have it
GLOO_THREADS = 2  # torch's default
# With 1, Work.wait blocks until the collective has ended, and if it fails or takes longer than the timeout,
# aborts this group's communicator and raises. The group has no watchdog thread then; with a watchdog, the
# default is that a failed collective ends the process. Each group reads the variable when it is made
# (constructor and WorkNCCL::wait in ProcessGroupNCCL.cpp).
BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"


def join(
    store: dist.Store,
    name: str,
    *,
    first: int,
    size: int,
    address: str,
    timeout: timedelta,
    over_host: bool = False,
) -> dist.ProcessGroup:
    """Join the group `name` with all ranks of this program's default group. Collective over both programs.

    The group has `size` ranks. This program's ranks are first, first + 1, ... of it; the other program calls
    join() with the `first` and the number of ranks that complete 0 .. size - 1. Tensors on the host are
    exchanged over gloo, those on a GPU over NCCL. over_host: the group has no NCCL, so that a thread may use
    it while the main thread's collectives run on the GPU.

    store: both programs' connection to one store. name: must not have been used on this store before.
    address: the address of this host at which the other ranks' gloo can connect to it. timeout: of the
    arrival of all ranks, and of each collective afterwards.
    Raises RuntimeError (torch's DistStoreError is one) if a rank is missing after `timeout`.
    Example: with 2 trainer ranks and a replica of 1 rank, the trainer passes first=0 and the replica first=2,
    both size=3. On the replica, dist.get_rank() is 0 and dist.get_rank(group) is 2.
    """
    rank, ranks = first + dist.get_rank(), global_ranks(first, size, dist.get_world_size())
    own = dist.PrefixStore(name, store)
    gpu = torch.cuda.is_available() and not over_host
    backends = {"cpu": "gloo", "cuda": "nccl"} if gpu else {"cpu": "gloo"}
    kind, names = dist.ProcessGroup.BackendType, ",".join(f"{at}:{name}" for at, name in backends.items())
    group = dist.ProcessGroup(own, rank, size)
    group._set_default_backend(kind.NCCL if gpu else kind.GLOO)
    gloo = _gloo(dist.PrefixStore("gloo", own), rank, size, address, timeout)
    group._register_backend(torch.device("cpu"), kind.GLOO, gloo)
    if gpu:
        nccl = _nccl(dist.PrefixStore("nccl", own), rank, size, name, ranks, timeout)
        group._register_backend(torch.device("cuda"), kind.NCCL, nccl)
    group._set_group_name(c10d.GroupName(name))
    group._set_group_desc(name)
    mapping = {global_rank: group_rank for group_rank, global_rank in enumerate(ranks)}
    c10d._register_pg_in_world(group, names, own, c10d.GroupName(name), names, rank_mapping=mapping)
    return group


def leave(group: dist.ProcessGroup) -> None:
    """Abort this group, without waiting for its other ranks. Other groups are not affected.

    NCCL's communicators are destroyed by ncclCommAbort, which also ends running collectives. Gloo's
    connections are closed when the last reference to the group is dropped, so the caller must drop its own:
    then the ranks that still wait for this one raise at once.
    """
    c10d._abort_process_group(group)


def global_ranks(first: int, size: int, world: int) -> list[int]:
    """Return the global rank of each group rank, in a program whose `world` ranks are first, first + 1, ...

    The other program's ranks have no number here. They get the numbers from `world` on.
    Example: global_ranks(2, 3, 1), on a replica of 1 rank beside 2 trainer ranks, is [1, 2, 0].
    """
    others = iter(range(world, size))
    return [at - first if first <= at < first + world else next(others) for at in range(size)]


def _gloo(store: dist.Store, rank: int, size: int, address: str, timeout: timedelta) -> Any:
    options = GLOO._Options()
    options._timeout, options._threads = timeout, GLOO_THREADS
    # All ranks are connected here, not at the first use as in the other groups. Otherwise a rank waits for
    # the first connection of a rank that has died, for the timeout and longer: its connect() is repeated.
    device = GLOO.create_device(hostname=address, lazy_init=False)
    options._devices = [device]
    return GLOO(store, rank, size, options)


def _nccl(store: dist.Store, rank: int, size: int, name: str, ranks: list[int], timeout: timedelta) -> Any:
    options = NCCL.Options()
    options._timeout, options.group_name, options.global_ranks_in_group = timeout, name, ranks
    before = os.environ.get(BLOCKING_WAIT)
    os.environ[BLOCKING_WAIT] = "1"  # NCCL's options have no field for it
    try:
        return NCCL(store, rank, size, options)
    finally:
        os.environ.pop(BLOCKING_WAIT)
        if before is not None:
            os.environ[BLOCKING_WAIT] = before
