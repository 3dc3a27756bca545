"""Ranks of two programs that join one group."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_stppo.parallel import bridge
from megatron_stppo.parallel.collectives import all_gather_bytes, all_to_all, any_rank, broadcast_bytes

SOON = timedelta(seconds=30)


def in_one_group(folder: Path, first: int, size: int) -> dict[str, Any]:
    """Exchange data over the group, then let its last rank die. Return what a rank got."""
    store = dist.FileStore(str(folder / "store"), size)
    rank = first + dist.get_rank()
    group = bridge.join(store, "b", first=first, size=size, address="127.0.0.1", timeout=SOON)
    got = {
        "rank": (dist.get_rank(), dist.get_rank(group), dist.get_world_size(group)),
        "globals": dist.get_process_group_ranks(group),
        "gathered": all_gather_bytes(b"x" * rank, group),
        "to all": all_to_all(torch.full((size,), rank), [1] * size, [1] * size, group).tolist(),
        "from 2": broadcast_bytes(bytes([rank]), 2, group),
        "any": any_rank(rank == 2, group),
    }
    if rank == size - 1:
        store.wait([str(other) for other in range(size - 1)])  # they have what this rank sent them
        os.kill(os.getpid(), signal.SIGKILL)
    store.set(str(rank), "done")
    try:
        any_rank(False, group)  # a ring: not every rank has the dead one as its neighbour
        got["after a death"] = "nothing"
    except RuntimeError as error:
        got["after a death"] = str(error)
    bridge.leave(group)
    del group
    got["own world"] = all_gather_bytes(bytes([rank]))
    return got
