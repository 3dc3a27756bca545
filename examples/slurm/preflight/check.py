"""The cluster check: every rank measures, the first rank judges, all ranks exit with the same code."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from examples.slurm.preflight import measure
from examples.slurm.preflight.exchange import Board, RankReport
from examples.slurm.preflight.judge import CheckRow, judge
from megatron_stppo.base.files import replacing
from megatron_stppo.cluster.launch import doctor, process, rendezvous, slurm
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


def check(settings: Settings) -> int:
    """Measure, print the table on the first rank, and return the exit code: 0, or FAILED if a row fails.

    The code is the same on all ranks. Then end the process with os._exit: a measurement that hangs keeps
    resources for which an orderly exit would wait.
    Needs torchrun's variables (cluster.launch.process). Raises ConfigError if the first rank does not answer.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        rendezvous.raise_file_limit(world)
        store = rendezvous.open_store(timedelta(seconds=settings.seconds))
        return _check(settings, Board(store, rank, world, settings.seconds))
    except (dist.DistError, TimeoutError) as error:
        raise ConfigError(f"rank {rank}: the first rank does not answer: {error}") from None


def _check(settings: Settings, board: Board) -> int:
    report = RankReport(os.environ.get("SLURMD_NODENAME") or socket.gethostname())
    name = board.announce("name", f"{time.time():.0f}", str)
    file = _file(settings, name, report.node)
    _measure_alone(settings, board.rank, report, file)
    alone = board.collect("alone", report)
    complete = len(alone) == board.world
    # the node of every rank; empty if a rank is missing, so that there is nothing to measure
    nodes = board.announce("nodes", [alone[r].node for r in alone] if complete else [], list[str], waits=8)
    gpus = board.announce("gpus", all("model of the GPUs" in one.texts for one in alone.values()), bool)
    together: dict[int, RankReport] = {}
    if nodes:
        _measure_together(settings, board, report, nodes, gpus, name)
        together = board.collect("together", report)
    code = 0
    if board.rank == 0:
        rows = judge(board.world, alone, together, settings.limits)
        show(rows, Console() if sys.stdout.isatty() else Console(width=160))
        code = FAILED if any(row.verdict == "fail" for row in rows) else 0
        if settings.output is not None:
            content = {"passed": code == 0, "rows": rows, "ranks": {**alone, **together}}
            settings.output.parent.mkdir(parents=True, exist_ok=True)
            with replacing(settings.output) as scratch:
                scratch.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")
    # After the table: torchrun kills all ranks as soon as one of them exits with an error.
    code = board.announce("code", code, int, waits=8)
    report.run("remove", settings.seconds, lambda _: file.unlink(missing_ok=True))
    board.leave(alone)
    return code


def _file(settings: Settings, check: str, node: str) -> Path:
    """Return the file that a node writes, and for which the others look. `check`: name of this check."""
    return settings.folder / f"preflight-{check}-{node}.tmp"


def _measure_alone(settings: Settings, rank: int, report: RankReport, file: Path) -> None:
    """Add to the report what this rank measures without the others."""
    who, seconds = f"rank {rank} ({report.node})", settings.seconds
    report.run("GPU", seconds, _measure_gpu, who)
    report.run("versions", seconds, measure.describe_software)
    report.run("limits", seconds, measure.measure_limits, who)
    report.run("network adapters", seconds, measure.measure_adapters, torch.cuda.device_count())
    if _local_rank() == 0:
        report.run("run folder", seconds, measure.measure_folder, file, settings.size)


def _measure_gpu(report: RankReport, who: str) -> None:
    has_gpu = torch.cuda.is_available()
    if not has_gpu and (problem := doctor.driver_problem()):
        report.faults["driver"] = problem
    slurm.check_gpus(os.environ, has_gpu)
    if has_gpu:
        measure.measure_gpu(report, who, process.device_index())


def _measure_together(
    settings: Settings, board: Board, report: RankReport, nodes: Sequence[str], gpus: bool, name: str
) -> None:
    """Add to the report what this rank measures with the others. name: of this check."""
    if _local_rank() == 0:
        files = {node: _file(settings, name, node) for node in nodes}
        longest = settings.limits["max_visible"]
        report.run("files of other nodes", settings.seconds, measure.wait_for_files, files, longest)
    report.run("network", settings.seconds, _measure_network, board, nodes, gpus)


def _measure_network(report: RankReport, board: Board, nodes: Sequence[str], gpus: bool) -> None:
    if gpus:
        torch.cuda.set_device(_local_rank())  # counts for this thread
    # Longer than the deadline of the measurement, so that torch's watchdog does not end the process first.
    measure.join_network(board.store, board.rank, board.world, gpus, 2 * board.seconds)
    measure.measure_bandwidth(report, nodes, gpus)


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def show(rows: Sequence[CheckRow], console: Console) -> None:
    """Print the table, then one line with the number of rows per verdict."""
    table = Table("check", "value", "limit", "verdict", title="preflight", title_justify="left")
    table.add_column("who fails, and what to do", ratio=1)
    for row in rows:
        more = [f"and {len(row.who) - SHOWN} more"] if len(row.who) > SHOWN else []
        what = "\n".join([*row.who[:SHOWN], *more, *([row.remedy] if row.remedy else [])])
        verdict = f"[{COLOUR[row.verdict]}]{row.verdict}[/]"
        table.add_row(escape(row.name), escape(row.value), escape(row.limit), verdict, escape(what))
    console.print(table)
    counts = Counter(row.verdict for row in rows)
    console.print(f"{counts['pass']} pass, {counts['fail']} fail, {counts['not checked']} not checked")
