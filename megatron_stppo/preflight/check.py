"""The cluster check: every rank measures, the first rank judges, all ranks exit with the same code."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console

from megatron_stppo.config import ConfigError
from megatron_stppo.launch import process, rendezvous
from megatron_stppo.preflight import gpu, host, network, table
from megatron_stppo.preflight.exchange import Board, Measurements
from megatron_stppo.preflight.judge import judge
from megatron_stppo.preflight.records import Bandwidth, Facts, Together

FAILED = 2  # exit code


@dataclass(frozen=True)
class Settings:
    folder: Path  # in which runs write
    limits: Mapping[str, float]  # as from limits.read
    seconds: float = 300.0  # for each measurement, and for the start of all ranks
    size: int = 2**30  # bytes that the first rank of a node writes and reads
    output: Path | None = None  # JSON file


@dataclass(frozen=True)
class Meeting:
    """What all ranks need for the measurements that they make together."""

    nodes: tuple[str, ...]  # of every rank; empty if a rank is missing, so that there is nothing to measure
    name: str  # of this check, part of its files' names
    has_gpus: bool  # every rank has its own


def check(settings: Settings) -> tuple[int, bool]:
    """Measure, and print the table on the first rank.

    Returns (exit code, whether a measurement of this rank hangs). The code is 0, or FAILED if a row fails,
    and is the same on all ranks. After a measurement that hangs, end the process with os._exit, because the
    measurement's thread may hold resources for which an orderly exit would wait.
    Needs torchrun's variables (launch.process). Raises ConfigError if the first rank does not answer.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        rendezvous.raise_file_limit(world)
        store = rendezvous.open_store(timedelta(seconds=settings.seconds))
        board = Board(store, rank, world, settings.seconds)
        code, hangs = _check(settings, board)
    except (dist.DistError, TimeoutError) as error:
        raise ConfigError(f"rank {rank}: the first rank does not answer: {error}") from None
    if dist.is_initialized() and not hangs:
        dist.destroy_process_group()
    return code, hangs


def _check(settings: Settings, board: Board) -> tuple[int, bool]:
    """Return (exit code, whether a measurement of this rank hangs)."""
    name = board.announce("name", f"{time.time():.0f}", str)
    file = host.file_of(settings.folder, name, _node())
    alone, met = Measurements(settings.seconds), Measurements(settings.seconds)

    facts = board.collect("facts", _alone(settings, board.rank, alone, file), Facts)
    nodes = tuple(facts[rank].node for rank in facts) if len(facts) == board.world else ()
    meeting = board.announce(
        "meeting", Meeting(nodes, name, all(one.gpu for one in facts.values())), Meeting, waits=8
    )
    together: dict[int, Together] = {}
    if meeting.nodes:
        together = board.collect("together", _together(settings, board, met, meeting), Together)
    code = 0
    if board.rank == 0:
        rows = judge(board.world, facts, together, settings.limits)
        table.show(rows, Console() if sys.stdout.isatty() else Console(width=160))
        if settings.output is not None:
            table.write(settings.output, rows, settings.limits, facts, together)
        code = 0 if table.passed(rows) else FAILED
    # After the table: torchrun kills all ranks as soon as one of them exits with an error.
    code = board.announce("code", code, int, waits=8)
    alone.run("remove", lambda: file.unlink(missing_ok=True))
    board.leave(facts)
    return code, alone.hanging or met.hanging


def _alone(settings: Settings, rank: int, measure: Measurements, file: Path) -> Facts:
    """Return what this rank measures without the others."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    found = (
        measure.run("GPU", lambda: gpu.examine(process.device_index())) if torch.cuda.is_available() else None
    )
    load = measure.run("matrix product", lambda: gpu.load(local) if found else gpu.load_cpu())
    if found and load:
        found = replace(found, clock=load.clock, throttled=load.throttled)
    return Facts(
        rank,
        _node(),
        local,
        expects_gpu=bool(os.environ.get("SLURM_GPUS_ON_NODE")),
        versions=measure.run("versions", host.versions) or {},
        gpu=found,
        compute=load.compute if load else None,
        open_files=host.open_files(),
        shared_memory=measure.run("/dev/shm", host.shared_memory),
        folder=None if local else measure.run("run folder", lambda: host.folder_speed(file, settings.size)),
        errors=measure.errors,
    )


def _together(settings: Settings, board: Board, measure: Measurements, meeting: Meeting) -> Together:
    """Return what this rank measures with the others."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    files = {node: host.file_of(settings.folder, meeting.name, node) for node in dict.fromkeys(meeting.nodes)}
    wait = settings.limits["max_visible"]
    seen = None if local else measure.run("files of other nodes", lambda: host.wait_for_files(files, wait))
    clock: list[float] = []
    speeds: list[Bandwidth] = []

    def network_of_ranks() -> None:
        if meeting.has_gpus:
            torch.cuda.set_device(local)  # counts for this thread
        # Longer than the deadline here, so that torch's watchdog does not end the process first.
        network.join(board.store, board.rank, board.world, meeting.has_gpus, 2 * settings.seconds)
        clock.extend(network.clock())
        speeds.extend(network.bandwidth(meeting.nodes, meeting.has_gpus))

    measure.run("network", network_of_ranks)
    visible, hidden = seen or (None, ())
    return Together(board.rank, visible, hidden, tuple(clock), tuple(speeds), measure.errors)


def _node() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
