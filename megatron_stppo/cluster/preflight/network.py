"""Measure the bus bandwidth of all-reduces in groups of ranks."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_stppo.cluster.preflight.exchange import RankReport
from megatron_stppo.cluster.preflight.limits import ALL, NODE, PAIR

MIB = 2**20
SIZES_CUDA, SIZES_CPU = (64 * MIB, 256 * MIB, 1024 * MIB), (MIB, 4 * MIB)
REPEATS, WARM_UP = 10, 3


def join(store: dist.Store, rank: int, world: int, cuda: bool, seconds: float) -> None:
    """Create the default process group, with the backends of a training run. Collective."""
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        # A connection of its own: while gloo waits on it for a missing rank, other uses of it would block.
        store=dist.PrefixStore("network", store.clone()),  # type: ignore[attr-defined]  # not in the stub
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=seconds),
    )


def groups(nodes: Sequence[str]) -> list[list[tuple[int, ...]]]:
    """Return rounds of groups of ranks. Groups of a round share no rank and are measured at the same time.

    nodes: the node of every rank. The rounds: every node; pairs of neighbours in a ring of the nodes, in two
    or three rounds; all ranks. A node that is slow in both of its pairs is a slow node.
    Example: ranks on nodes a, a, b, b give [[(0, 1), (2, 3)], [(0, 1, 2, 3)]].
    """
    names = list(dict.fromkeys(nodes))
    ranks = {name: tuple(rank for rank, node in enumerate(nodes) if node == name) for name in names}
    chain = [ranks[a] + ranks[b] for a, b in itertools.pairwise(names)]
    rounds = [list(ranks.values()), chain[::2], chain[1::2]]
    if len(names) > 2:
        closing = ranks[names[0]] + ranks[names[-1]]
        if len(names) % 2:
            rounds.append([closing])
        else:
            rounds[2].append(closing)
        rounds.append([tuple(range(len(nodes)))])
    several = [[group for group in one if len(group) > 1] for one in rounds]
    return [one for one in several if one]


def measure_bandwidth(report: RankReport, nodes: Sequence[str], cuda: bool) -> None:
    """Add the bandwidth in every group of which this rank is a member. Collective."""
    for one in groups(nodes):
        # All ranks create all groups: gloo hangs if ranks have created different numbers of groups.
        created = [(group, dist.new_group(list(group))) for group in one]
        for group, process_group in created:
            if dist.get_rank() in group:
                where = list(dict.fromkeys(nodes[member] for member in group))
                limit = {1: NODE, 2: PAIR}.get(len(where), ALL)
                fastest = max(
                    bus_bandwidth(size, _all_reduce(size, process_group, cuda), len(group))
                    for size in (SIZES_CUDA if cuda else SIZES_CPU)
                )
                report.numbers.append((limit, "all" if limit == ALL else " + ".join(where), fastest))
        dist.all_reduce(torch.zeros(1))  # the next round begins when no group of this one uses the network


def bus_bandwidth(size: int, seconds: float, ranks: int) -> float:
    """Return GB/s through the slowest link of a ring, which does not depend on the number of ranks.

    Formula of the nccl-tests: size / seconds x 2(n-1)/n. Example: 1 GB in 0.01 s on 8 ranks: 175 GB/s.
    """
    return size / seconds * 2 * (ranks - 1) / ranks / 1e9


def _all_reduce(size: int, group: dist.ProcessGroup | None, cuda: bool) -> float:
    """Return seconds per all-reduce of `size` bytes."""
    message = torch.zeros(size // 2, dtype=torch.bfloat16, device="cuda" if cuda else "cpu")
    for repeats in (WARM_UP, REPEATS):
        start = time.perf_counter()
        for _ in range(repeats):
            dist.all_reduce(message, group=group)
        if cuda:
            torch.cuda.synchronize()
    return (time.perf_counter() - start) / REPEATS
