"""cells.csv: what is known of each finished cell, a row when it ends. Rows are only added."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import pynvml

from megatron_stppo.config import ConfigError
from megatron_stppo.evidence.compare.grid import Cell, Grid
from megatron_stppo.observe import rows

FILE = "cells.csv"


@dataclass(frozen=True)
class Result:
    """A finished cell. Example: Result("st_ppo", "high", 3, 0.81, "NVIDIA H100 80GB HBM3")."""

    arm: str
    setting: str
    seed: int
    outcome: float
    device: str
    iterations: int = 0  # that were trained
    seconds: float = 0.0  # of all attempts
    ended: str = "done"  # or why it ended early for good
    digest: str = ""  # Grid.digest; "" in a table from elsewhere

    @property
    def cell(self) -> Cell:
        return Cell(self.arm, self.setting, self.seed)


def read(folder: Path) -> dict[Cell, Result]:
    """Return the results in a folder. Raises ConfigError for a damaged file."""
    path = folder / FILE
    if not path.exists():
        return {}
    found: dict[Cell, Result] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.DictReader(file), 2):
            try:
                kinds = {field.name: field.type for field in fields(Result)}
                of = {"int": int, "float": float, "str": str}
                one = Result(**{name: of[str(kinds[name])](value) for name, value in row.items() if value})
            except (KeyError, TypeError, ValueError) as error:
                raise ConfigError(f"{path}: line {number} is damaged ({error}); remove the line") from None
            if one.cell in found:
                raise ConfigError(f"{path}: line {number}: {one.cell.name} is there twice; remove one line")
            found[one.cell] = one
    return found


def add(folder: Path, result: Result) -> None:
    path, row = folder / FILE, asdict(result)
    is_new = not path.exists()
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(row)
        file.flush()
        os.fsync(file.fileno())


def measured(grid: Grid, cell: Cell, run: Path, device: str, ended: str, seconds: float) -> Result:
    """Return the result of a run that has ended for good. Raises ValueError if it has no outcome."""
    recorded = rows.read(run / "metrics.jsonl")
    iterations, values = rows.column(recorded, grid.outcome.metric)
    outcome = grid.outcome.of(dict(zip(iterations, values, strict=True)))
    trained = int(recorded[-1]["iteration"])
    where = (cell.arm, cell.setting, cell.seed)
    return Result(*where, round(outcome, 6), device, trained, round(seconds, 1), ended, grid.digest(cell))


def check(grid: Grid, found: Mapping[Cell, Result], device: str) -> None:
    """Raise ConfigError if the results cannot be continued with this grid on this device."""
    waits = any(cell not in found for cell in grid.cells())
    for cell in grid.cells():
        known = found.get(cell)
        if known is None:
            continue
        if known.digest and known.digest != grid.digest(cell):
            raise ConfigError(
                f"{grid.folder}/{FILE}: {cell.name} was run with other overrides or another {grid.config}; "
                "undo the change, give another folder, or remove its line and its run"
            )
        if known.device != device and waits:
            raise ConfigError(
                f"{grid.folder}/{FILE}: its cells ran on {known.device}, and this machine has {device}: a "
                "contrast of both would compare machines; continue there, or give another folder"
            )


def devices() -> tuple[str, int]:
    """Return (name of the GPU, their number), or the processor and the number of cores."""
    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        count = len(visible.split(",")) if visible else pynvml.nvmlDeviceGetCount()
        if count and visible != "":
            return str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0))), count
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    given = dict(line.replace("\t", "").split(":", 1) for line in reversed(lines) if ":" in line)
    wide = "with" if " avx512f " in f"{given.get('flags', '')} " else "without"
    name = given.get("model name", "CPU").strip()
    return f"{name}, {wide} AVX-512", len(os.sched_getaffinity(0))
