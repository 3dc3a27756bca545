"""The cluster check: every rank measures, the first rank judges, all ranks exit with the same code."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron_stppo.base.files import replacing
from megatron_stppo.cluster.launch import process, rendezvous
from megatron_stppo.cluster.preflight import gpu, host, network
from megatron_stppo.cluster.preflight.exchange import Board, Measurements
from megatron_stppo.cluster.preflight.judge import CheckRow, judge
from megatron_stppo.cluster.preflight.records import Bandwidth, Facts, Together
from megatron_stppo.config import ConfigError

FAILED = 2  # exit code
COLOUR = {"pass": "green", "fail": "red", "not checked": "yellow"}
SHOWN = 4  # failing ranks per row; the JSON file has all


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
    has_gpus: bool  # every rank has its own


def check(settings: Settings) -> tuple[int, bool]:
    """Measure, and print the table on the first rank.

    Returns (exit code, whether a measurement of this rank hangs). The code is 0, or FAILED if a row fails,
    and is the same on all ranks. After a measurement that hangs, end the process with os._exit, because the
    measurement's thread may hold resources for which an orderly exit would wait.
    Needs torchrun's variables (cluster.launch.process). Raises ConfigError if the first rank does not answer.
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
        "meeting", Meeting(nodes, all(one.gpu for one in facts.values())), Meeting, waits=8
    )
    together: dict[int, Together] = {}
    if meeting.nodes:
        together = board.collect("together", _together(settings, board, met, meeting, name), Together)
    code = 0
    if board.rank == 0:
        rows = judge(board.world, facts, together, settings.limits)
        show(rows, Console() if sys.stdout.isatty() else Console(width=160))
        code = FAILED if any(row.verdict == "fail" for row in rows) else 0
        if settings.output is not None:
            written: dict[str, list[Any]] = {
                "rows": rows,
                "facts": [*facts.values()],
                "together": [*together.values()],
            }
            content: dict[str, Any] = {name: [asdict(x) for x in found] for name, found in written.items()}
            content["passed"] = code == 0
            settings.output.parent.mkdir(parents=True, exist_ok=True)
            with replacing(settings.output) as scratch:
                scratch.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    # After the table: torchrun kills all ranks as soon as one of them exits with an error.
    code = board.announce("code", code, int, waits=8)
    alone.run("remove", lambda: file.unlink(missing_ok=True))
    board.leave(facts)
    return code, alone.hanging or met.hanging


def _alone(settings: Settings, rank: int, measure: Measurements, file: Path) -> Facts:
    """Return what this rank measures without the others."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    found = compute = None
    if torch.cuda.is_available():
        found = measure.run("GPU", lambda: gpu.examine(process.device_index()))
    if found is None:
        compute = measure.run("matrix product", gpu.load_cpu)
    elif load := measure.run("matrix product", lambda: gpu.load(local)):
        compute, clock, throttled = load
        found = replace(found, clock=clock, throttled=throttled)
    return Facts(
        rank,
        _node(),
        expects_gpu=bool(os.environ.get("SLURM_GPUS_ON_NODE")),
        versions=measure.run("versions", host.versions) or {},
        gpu=found,
        compute=compute,
        open_files=host.open_files(),
        shared_memory=measure.run("/dev/shm", host.shared_memory),
        folder=None if local else measure.run("run folder", lambda: host.folder_speed(file, settings.size)),
        errors=measure.errors,
    )


def _together(
    settings: Settings, board: Board, measure: Measurements, meeting: Meeting, name: str
) -> Together:
    """Return what this rank measures with the others. name: of this check, part of its files' names."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    files = {node: host.file_of(settings.folder, name, node) for node in dict.fromkeys(meeting.nodes)}
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


def show(rows: Sequence[CheckRow], console: Console) -> None:
    """Print the table, then one line with the number of rows per verdict."""
    table = Table(
        "check", "value", "limit", "verdict", title="megatron-stppo doctor --cluster", title_justify="left"
    )
    table.add_column("who fails, and what to do", ratio=1)
    for row in rows:
        more = [f"and {len(row.who) - SHOWN} more"] if len(row.who) > SHOWN else []
        what = "\n".join([*row.who[:SHOWN], *more, *([row.remedy] if row.remedy else [])])
        verdict = f"[{COLOUR[row.verdict]}]{row.verdict}[/]"
        table.add_row(escape(row.name), escape(row.value), escape(row.limit), verdict, escape(what))
    console.print(table)
    counts = Counter(row.verdict for row in rows)
    console.print(f"{counts['pass']} pass, {counts['fail']} fail, {counts['not checked']} not checked")


def _node() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
