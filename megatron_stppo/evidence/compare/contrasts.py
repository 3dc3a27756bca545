"""What is known of finished cells, and a grid's declared contrasts: t intervals, t tests, adjustment by Holm.

cells.csv gets a row when a cell ends; rows are only added. The report shows the contrasts as text, and on one
HTML page with a figure and the cells' means.
"""

import base64
import csv
import io
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from html import escape
from itertools import groupby
from pathlib import Path
from statistics import fmean, stdev

import pynvml
from matplotlib.figure import Figure
from mpmath import betainc, findroot
from pydantic import TypeAdapter

from megatron_stppo.base.files import replacing
from megatron_stppo.config import ConfigError
from megatron_stppo.evidence.compare.grid import Cell, ContrastFamily, Grid, Side, Sides
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


Table = tuple[str, list[Sequence[str]]]  # title and rows, of which the first is the head
STYLE = """body { font: 15px system-ui, sans-serif; max-width: 62em; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; margin: 1em 0 2em; } td { padding: .25em .8em; text-align: right; }
tr:first-child { border-bottom: 1px solid #888; } td:first-child { text-align: left; } img { width: 100%; }"""


@dataclass(frozen=True)
class Contrast:
    """Left minus right, paired by seed.

    Example: outcomes 0.6 and 0.8 on seeds 0 and 1 against 0.5 and 0.5: differences {0: 0.1, 1: 0.3}.
    """

    family: ContrastFamily
    label: str
    declared: int  # seeds
    differences: dict[int, float] = field(default_factory=dict)  # by seed
    refused: str = ""  # why it is not computed
    p: float = math.nan  # adjusted by Holm for all contrasts of the family; only if all seeds have been run

    @property
    def effect(self) -> tuple[float, float]:
        """Mean difference and half of its 95 % t interval, if there is a difference."""
        return mean_interval(list(self.differences.values()))


def contrasts(grid: Grid, results: Results) -> list[Contrast]:
    """Return all declared contrasts, in order. A contrast whose cells ran on different devices is refused."""
    return [contrast for family in grid.contrasts for contrast in _of(grid, family, results)]


def _of(grid: Grid, family: ContrastFamily, results: Results) -> list[Contrast]:
    every = [_contrast(family, label, sides, results, grid.seeds) for label, sides in grid.declared(family)]
    complete = [n for n, of in enumerate(every) if of.differences and len(of.differences) == of.declared]
    ps = [paired_p(list(every[n].differences.values())) for n in complete]
    for n, adjusted in zip(complete, holm(ps, len(every)), strict=True):
        every[n] = replace(every[n], p=adjusted)
    return every


def _contrast(
    family: ContrastFamily, label: str, sides: Sides, results: Results, seeds: list[int]
) -> Contrast:
    of_seed = {s: [Cell(arm, setting, s) for arm, weights in sides for setting in weights] for s in seeds}
    whole = [seed for seed in seeds if all(cell in results for cell in of_seed[seed])]
    devices = {results[cell].device for seed in whole for cell in of_seed[seed]}
    if len(devices) > 1:
        why = f"its cells ran on different devices ({'; '.join(sorted(devices))})"
        return Contrast(family, label, len(seeds), refused=why)

    def mean(side: Side, seed: int) -> float:
        arm, weights = side
        total = sum(weight * results[Cell(arm, setting, seed)].outcome for setting, weight in weights.items())
        return total / sum(weights.values())

    left, right = sides
    return Contrast(family, label, len(seeds), {s: mean(left, s) - mean(right, s) for s in whole})


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return (mean, half of its 95 % t interval); NaN as the half of a single value.

    Example: 1, 2, 3: 2 and 4.303 * 1 / sqrt(3) = 2.484.
    """
    if len(values) < 2:
        return fmean(values), math.nan
    return fmean(values), quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))


def paired_p(differences: Sequence[float]) -> float:
    """Return the two-sided p of Student's t test that the mean difference is 0; NaN with fewer than two.

    Example: 1, 2, 3 have t = 2 / (1 / sqrt(3)) = 3.46 with 2 degrees of freedom, p = 0.074.
    """
    count = len(differences)
    if count < 2:
        return math.nan
    spread, middle = stdev(differences), abs(fmean(differences))
    if spread == 0:
        return 1.0 if middle == 0 else 0.0
    return student(middle * math.sqrt(count) / spread, count - 1)


def holm(values: Sequence[float], declared: int) -> list[float]:
    """Return p values adjusted by Holm's method for `declared` tests, of which some may not exist yet.

    Example: 0.01, 0.04 of two tests: 0.02 and 0.04.
    """
    adjusted, highest = [0.0] * len(values), 0.0
    for rank, place in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        highest = max(highest, min(1.0, (declared - rank) * values[place]))
        adjusted[place] = highest
    return adjusted


def student(t: float, freedom: int) -> float:
    """Return P(|T| > t) of Student's t with this many degrees of freedom.

    Example: one degree of freedom and t = 1: 1 - 2/pi * pi/4 = 0.5.
    """
    return float(betainc(freedom / 2, 0.5, 0, freedom / (freedom + t * t), regularized=True))


def quantile(freedom: int) -> float:
    """Return t with P(|T| > t) = 0.05. Example: 12.706 with one degree of freedom."""
    return float(findroot(lambda t: student(float(t), freedom) - 0.05, (1, 16), solver="illinois", tol=1e-20))


def text(grid: Grid, results: Results) -> str:
    """Return the contrasts as a Markdown table per family."""
    lines = []
    for title, (head, *rows) in _families(contrasts(grid, results)):
        every = [head, ["---"] * len(head), *rows]
        lines += [title, "", *(f"| {' | '.join(cells)} |" for cells in every), ""]
    done = sum(cell in results for cell in grid.cells())
    return "\n".join([*lines, f"{done} of {len(grid.cells())} cells are done; outcome: {_outcome(grid)}"])


def write(grid: Grid, results: Results, path: Path) -> None:
    """Write the page. It needs only a browser."""
    every = contrasts(grid, results)
    parts = [f"<h1>{escape(path.stem)}</h1><p>Outcome: {escape(_outcome(grid))}.</p>"]
    if any(contrast.differences for contrast in every):
        parts.append(f'<img alt="differences" src="data:image/png;base64,{_figure(every)}">')
    for title, rows in [*_families(every), _means(grid, results)]:
        cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
        parts.append(f"<h2>{escape(title)}</h2><table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>")
    body = f"<!doctype html><meta charset=utf-8><title>compare</title><style>{STYLE}</style>{''.join(parts)}"
    with replacing(path) as scratch:
        scratch.write_text(body, encoding="utf-8")


def _outcome(grid: Grid) -> str:
    of = grid.outcome
    return f"{of.at} {of.metric}, iterations {of.first} to {'the last' if of.last is None else of.last}"


def _families(every: Sequence[Contrast]) -> Iterator[Table]:
    head = ("contrast", "difference, 95 % interval", "seeds", "p, Holm")
    for family, of in groupby(every, key=lambda contrast: contrast.family):
        yield f"{family.family}{' (post hoc)' * family.post_hoc}", [head, *map(_row, of)]


def _row(of: Contrast) -> Sequence[str]:
    if of.refused:
        return of.label, f"refused: {of.refused}", "", ""
    effect = _interval(*of.effect, "+.3f") if of.differences else "no seed is complete"
    p = "not complete" if math.isnan(of.p) else f"{of.p:.3f}" if of.p >= 0.001 else "< 0.001"
    return of.label, effect, f"{len(of.differences)} of {of.declared}", p


def _interval(middle: float, half: float, form: str) -> str:
    return f"{middle:{form}}" + ("" if math.isnan(half) else f" ± {half:.3f}")


def _means(grid: Grid, results: Results) -> Table:
    rows: list[Sequence[str]] = [("arm", *grid.settings)]
    for arm in grid.arms:
        cells = [[Cell(arm, setting, seed) for seed in grid.seeds] for setting in grid.settings]
        values = [[results[cell].outcome for cell in of if cell in results] for of in cells]
        shown = [f"{_interval(*mean_interval(of), '.3f')} ({len(of)})" if of else "" for of in values]
        rows.append((arm, *shown))
    return "Mean of each arm in each setting, 95 % interval (seeds)", rows


def _figure(every: Sequence[Contrast]) -> str:
    """Return a PNG in base64: every contrast's difference with its interval. Post hoc ones are hollow."""
    shown = [contrast for contrast in every if contrast.differences]
    figure = Figure(figsize=(9, 1 + 0.28 * len(shown)), layout="constrained")
    axes = figure.add_subplot()
    axes.axvline(0, color="0.6", linewidth=1)
    for place, contrast in enumerate(shown):
        middle, half = contrast.effect
        face = "white" if contrast.family.post_hoc else "C0"
        axes.errorbar(middle, -place, xerr=0 if math.isnan(half) else half, fmt="o", color="C0", mfc=face)
    axes.set_yticks([-n for n in range(len(shown))], [contrast.label for contrast in shown])
    axes.set_xlabel("difference, 95 % t interval over seeds (hollow: post hoc)")
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=130)
    return base64.b64encode(out.getvalue()).decode()
