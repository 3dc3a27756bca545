"""Make the tables and the figure of docs/lora.md that compare all weights with adapters."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tools.study.adapter_settings import ADAPTED, ITERATIONS, LADDERS, RANKS
from tools.study.collect import EXACT_MATCH, read_parquet
from tools.study.judge import mean_interval

Row = dict[str, Any]
Cells = dict[int, dict[float, dict[int, float]]]  # {rank: {learning rate: {seed: value}}}
PICTURE = "lora.png"
EARLY, LATE = (2, 10), (12, ITERATIONS)  # first and last iteration of the evaluations in a mean
NAMES = {rank: f"rank {rank}" if rank else "all weights" for rank in RANKS}
COLORS = dict(zip(RANKS, ("#000000", "#0072b2", "#009e73", "#d55e00"), strict=True))


def sections(folder: Path, shown: Path) -> list[str]:
    """Return Markdown lines and write the figure. `shown` is the folder's path in the document."""
    rows = [row for row in read_parquet(folder / "curves.parquet") if row["setting"] in ADAPTED]
    if not rows:
        return ["No run has finished yet."]
    late, early = cells(rows, LATE), cells(rows, EARLY)
    runs = sum(len(seeds) for of in late.values() for seeds in of.values())
    planned = 3 * sum(len(ladder) for ladder in LADDERS.values())
    draw(late, early, folder / PICTURE)
    lines = [f"{runs} of {planned} runs are finished.", "", *rate_table(late)]
    return [*lines, "", f"![adapters]({shown / PICTURE})", "", *best_table(late, early, seconds(rows))]


def cells(rows: Sequence[Row], window: tuple[int, int]) -> Cells:
    """Return the mean exact match of the evaluations in the window, both ends included.

    An evaluation that a run does not reach counts as 0.
    """
    first, last = window
    found: dict[tuple[int, float, int], float] = defaultdict(float)
    for row in rows:
        if row[EXACT_MATCH] is not None:
            is_inside = first <= row["iteration"] <= last
            found[(*ADAPTED[row["setting"]], row["seed"])] += row[EXACT_MATCH] if is_inside else 0.0
    grid: Cells = {}
    for (rank, rate, seed), total in sorted(found.items()):
        grid.setdefault(rank, {}).setdefault(rate, {})[seed] = total / len(range(first, last + 1, 2))
    return grid


def seconds(rows: Sequence[Row]) -> dict[int, float]:
    """Return {rank: median seconds of the updates of an iteration}."""
    found: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        if row["seconds/update"] is not None and row["iteration"] > 0:
            found[ADAPTED[row["setting"]][0]].append(row["seconds/update"])
    return {rank: statistics.median(values) for rank, values in found.items()}


def rate_table(late: Cells) -> list[str]:
    """Return a table with a row per rank and a column per learning rate."""
    rates = sorted({rate for of in late.values() for rate in of})
    lines = [_line(["trained", *(f"{rate:g}" for rate in rates)]), _line(["---"] * (1 + len(rates)))]
    for rank, of in late.items():
        lines.append(_line([NAMES[rank], *(_interval(of.get(rate, {})) for rate in rates)]))
    return lines


def best_table(late: Cells, early: Cells, took: Mapping[int, float]) -> list[str]:
    """Return a table of every rank at its best rate, with the difference from all weights at theirs."""
    head = ["trained", "best rate", "late", "early", "late less all weights", "early less all weights"]
    lines = [_line([*head, "seconds per update"]), _line(["---"] * (1 + len(head)))]
    means = {rank: {x: statistics.fmean(of[x].values()) for x in of} for rank, of in late.items()}
    chosen = {rank: max(of, key=lambda rate: of[rate]) for rank, of in means.items()}
    for rank, rate in chosen.items():
        both = [of[rank][rate] for of in (late, early)]
        apart = ["", ""]
        if rank and 0 in chosen:
            apart = [_difference(x, of[0][chosen[0]]) for x, of in zip(both, (late, early), strict=True)]
        values = [f"{rate:g}", *map(_interval, both), *apart, f"{took[rank]:.2f}"]
        lines.append(_line([NAMES[rank], *values]))
    return lines


def draw(late: Cells, early: Cells, output: Path) -> None:
    """Draw exact match over the learning rate, a line per rank through the means and a point per run."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    titles = {f"evaluations {first} to {last}": of for (first, last), of in ((EARLY, early), (LATE, late))}
    for axis, (title, grid) in zip(figure.subplots(1, 2, sharey=True), titles.items(), strict=True):
        for rank, of in grid.items():
            means = [statistics.fmean(seeds.values()) for seeds in of.values()]
            axis.plot(list(of), means, color=COLORS[rank], label=NAMES[rank])
            points = [(rate, value) for rate, seeds in of.items() for value in seeds.values()]
            axis.plot(*zip(*points, strict=True), "o", color=COLORS[rank], markersize=3)
        axis.set(title=f"held-out exact match, {title}", xlabel="actor's learning rate", xscale="log")
        axis.set_ylim(0, 1)
        axis.grid(alpha=0.3)
    figure.axes[0].legend()
    figure.savefig(output, format="png", dpi=90)


def _difference(left: Mapping[int, float], right: Mapping[int, float]) -> str:
    both = sorted(left.keys() & right.keys())
    return _interval({seed: left[seed] - right[seed] for seed in both}, sign="+")


def _interval(cell: Mapping[int, float], sign: str = "") -> str:
    """Return mean, half of the 95 % t interval and count. Example: "0.71 ± 0.05 (3)"."""
    if not cell:
        return ""
    middle, half = mean_interval(list(cell.values()))
    return f"{middle:{sign}z.2f}" + ("" if math.isnan(half) else f" ± {half:.2f}") + f" ({len(cell)})"


def _line(values: Sequence[str]) -> str:
    return f"| {' | '.join(values)} |"
