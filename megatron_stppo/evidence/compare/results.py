"""cells.csv: what is known of each finished cell, a row when it ends. Rows are only added."""

import csv
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import pynvml
from pydantic import TypeAdapter

from megatron_stppo.config import ConfigError
from megatron_stppo.evidence.compare.grid import Cell, Grid
from megatron_stppo.observe.run_files import column, read_rows

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


Results = Mapping[Cell, Result]


def read(folder: Path) -> dict[Cell, Result]:
    """Return the results in a folder. Raises ConfigError for a damaged file."""
    path, known, kind = folder / FILE, dict[Cell, Result](), TypeAdapter(Result)
    if not path.exists():
        return known
    with path.open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.DictReader(file), 2):
            try:
                result = kind.validate_python({name: value for name, value in row.items() if value})
            except (TypeError, ValueError) as error:
                raise ConfigError(f"{path}: line {number} is damaged ({error}); remove the line") from None
            if result.cell in known:
                raise ConfigError(
                    f"{path}: line {number}: {result.cell.name} is there twice; remove one line"
                )
            known[result.cell] = result
    return known


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


def measured(grid: Grid, cell: Cell, run: Path, device: str, ended: str) -> Result:
    """Return the result of a run that has ended for good. Raises ValueError if it has no outcome."""
    recorded = read_rows(run / "metrics.jsonl")
    outcome = grid.outcome.of(dict(zip(*column(recorded, grid.outcome.metric), strict=True)))
    return Result(
        **vars(cell),
        outcome=round(outcome, 6),
        device=device,
        iterations=int(recorded[-1]["iteration"]),
        seconds=round(sum(column(recorded, "seconds")[1]), 1),
        ended=ended,
        digest=grid.digest(cell),
    )


def check(grid: Grid, results: Results, device: str) -> None:
    """Raise ConfigError if the results cannot be continued with this grid on this device."""
    waits = any(cell not in results for cell in grid.cells())
    for cell in results.keys() & grid.cells():
        known = results[cell]
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
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    name = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    wide = "with" if " avx512f " in text else "without"
    return f"{name[1].strip() if name else 'CPU'}, {wide} AVX-512", len(os.sched_getaffinity(0))
