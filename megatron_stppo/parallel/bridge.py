"""A process group that joins the ranks of two programs, each of which has a default process group of its own.

torch.distributed makes groups inside one default group only, and its functions refuse a group that they do
not know. The function below calls the same private function as init_process_group, and registers the ranks.
"""

from __future__ import annotations

import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


def host_store(address: str, timeout: timedelta) -> tuple[dist.Store, int]:
    """Return a store, and its port, that listens on the interface of this IP address only."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    own = socket.create_server((address, 0), family=family)
    port = int(own.getsockname()[1])
    store = dist.TCPStore(
        address, port, None, True, timeout, wait_for_workers=False, master_listen_fd=own.detach()
    )
    return store, port


def connect_store(address: str, port: int, timeout: timedelta) -> dist.Store:
    """Return the store that another process hosts."""
    return dist.TCPStore(address, port, None, False, timeout, wait_for_workers=False)


def join(
    store: dist.Store, name: str, place: int, size: int, own_first: int, timeout: timedelta
) -> dist.ProcessGroup:
    """Join the group `name` as its rank `place`. Collective over all `size` ranks of both programs.

    The ranks of each program are consecutive in the group; own_first: the group's rank of this program's
    first rank. torch.distributed's functions identify a rank by its number in the default group; the ranks of
    the other program get numbers that follow those of this program.
    name: never used before on the store, and by no group of this program.
    Example: a replica of 1 rank joins a trainer of 2 ranks with place=2, size=3, own_first=2.
    """
    backends = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    group, _ = c10d._new_process_group_helper(
        size, place, [], backends, store, c10d.GroupName(name), timeout=timeout
    )
    own = dist.get_world_size()
    theirs = [rank for rank in range(size) if not own_first <= rank < own_first + own]
    number = {own_first + rank: rank for rank in range(own)} | {r: own + i for i, r in enumerate(theirs)}
    c10d._world.pg_group_ranks[group] = {number[rank]: rank for rank in range(size)}
    return group


def leave(group: dist.ProcessGroup) -> None:
    """Close the connections of this rank in the group. Not collective: the others' next operation fails."""
    if group in c10d._world.pg_map:
        dist.destroy_process_group(group)
