"""The function of a rank in test_deadlines: collectives with the others, until a deadline ends it."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_stppo.cluster import deadlines
from megatron_stppo.cluster.launch import process


def walk(rank: int, world: int, folder: Path, deadline: float) -> None:
    """Run steps in phase score forever. Output goes to folder/stderr-N."""
    with (folder / f"stderr-{rank}").open("w") as file:
        os.dup2(file.fileno(), 2)
    deadlines.BEAT, deadlines.SILENT = 0.2, 0.8
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(minutes=2))
    process.log_to(folder, rank)
    limits = {"start_up": 60.0, "score": deadline, "other": 60.0}
    with deadlines.Watchdog(folder, limits, rank, world) as watchdog:
        while True:
            with watchdog.phase("score"):
                dist.all_reduce(torch.ones(8))
                time.sleep(0.01)
