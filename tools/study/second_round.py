"""Make the tables and figures of the second round, in docs/study.md, from curves.parquet.

This file makes those about the learning rates. lag_report.py makes those about the lags, and sums_report.py
those about the third task.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from tools.study import lag_report
from tools.study.cells import SIZES, difference, interval, markdown, number, shown_p, table
from tools.study.collect import EXACT_MATCH, read_parquet
from tools.study.contrasts import (
    EQUIVALENCE_RATE,
    EQUIVALENCE_SEEDS,
    EQUIVALENT,
    FIRST,
    LATER,
    MARGIN,
    SEEDS,
    WINDOW,
    Contrast,
    Grid,
    areas,
    best_of,
    bootstrap,
    contrasts,
    endpoint,
    equivalence,
    equivalence_differences,
)
from tools.study.figures import STYLES
from tools.study.matrix import ADDED_ARMS, ARMS, NARROWED, OTHERS, RATES

Row = dict[str, Any]
ADDED = ADDED_ARMS | NARROWED
PICTURE = "rates.png"
SHARE = 0.9  # of the best cell, for the contour of the heat map and the range of rates
BRIGHT = 0.6  # exact match of a cell of the heat map on which white numbers are hard to read


def sections(folder: Path, shown: Path) -> list[str]:
    """Return Markdown lines and write the figure. `shown` is the folder's path in the document."""
    every = read_parquet(folder / "curves.parquet")
    rows = [row for row in every if row["setting"] in RATES]
    lines, tables = _of_rates(rows, folder, shown) if rows else ([], [])
    of_lags, more = lag_report.sections(every, folder, shown)
    lines, tables = lines + of_lags, tables + more
    return lines + (["", "## Appendix: tables", *tables] if tables else []) or ["No run has finished yet."]


def _of_rates(rows: Sequence[Row], folder: Path, shown: Path) -> tuple[list[str], list[str]]:
    """Return the lines of the results and those of the appendix, and write the figure.

    Seeds outside SEEDS are of the test of equivalence alone.
    """
    equivalent = equivalence_table(grid_of(rows))
    rows = [row for row in rows if row["seed"] in SEEDS]
    if not rows:
        return equivalent, []
    grid = grid_of(rows)
    first, later, added = (
        {arm: cells for arm, cells in grid.items() if arm in group} for group in (ARMS, OTHERS, ADDED)
    )
    counts = [f"{runs_of(first)} of the first stage", f"{runs_of(later)} of the second family"]
    counts += [f"{runs_of({arm: cells})} of `{arm}`" for arm, cells in added.items()]
    draw(grid, rows, folder / PICTURE)
    lines = [f"Finished runs: {', '.join(counts)}.", "", f"![rates]({shown / PICTURE})"]
    lines += ["", f"{FIRST}:", "", *contrast_table(contrasts(grid))]
    families = [(title, pairs, more) for title, pairs in LATER.items() if (more := contrasts(grid, pairs))]
    for title, _, more in families:
        lines += ["", f"{title}:", "", *contrast_table(more)]
    lines += ["", *equivalent] if equivalent else []
    tables = ["", "Endpoints: mean over seeds ± half of the 95 % t interval (seeds).", "", *cell_table(grid)]
    tables += ["", f"{FIRST}:", "", *area_table(grid, list(first))]
    for title, pairs, _ in families:
        arms = [arm for arm in grid if any(arm in pair for pair in pairs)]
        tables += ["", f"{title}:", "", *area_table(grid, arms)]
    return lines, tables


def runs_of(grid: Grid) -> int:
    """Return the number of runs."""
    return sum(len(cell) for arm in grid.values() for cell in arm.values())


def grid_of(rows: Sequence[Row]) -> dict[str, dict[float, dict[int, float]]]:
    """Return {arm: {rate: {seed: endpoint}}} of the rows of the second round."""
    found: dict[tuple[str, float, int], dict[int, float]] = defaultdict(dict)
    for row in rows:
        if row[EXACT_MATCH] is not None:
            place = row["algorithm"], RATES[row["setting"]], row["seed"]
            found[place][row["iteration"]] = row[EXACT_MATCH]
    grid: dict[str, dict[float, dict[int, float]]] = {}
    for (arm, rate, seed), curve in sorted(found.items()):
        grid.setdefault(arm, {}).setdefault(rate, {})[seed] = endpoint(curve)
    return {arm: grid[arm] for arm in (*ARMS, *ADDED, *OTHERS) if arm in grid}


def cell_table(grid: Grid) -> list[str]:
    """Return a table of endpoints: a row per arm, a column per rate, and the rates at SHARE of the best."""
    best = best_of(grid)
    head = ["arm", *(f"{rate:g}" for rate in RATES.values()), f"rates at {SHARE:.0%} of {best:.2f}"]
    lines = [markdown(head), markdown(["---"] * len(head))]
    for arm, cells in grid.items():
        good = [r for r in RATES.values() if r in cells and _mean(cells[r]) >= SHARE * best]
        values = [interval(list(cells.get(rate, {}).values())) for rate in RATES.values()]
        lines.append(markdown([f"`{arm}`", *values, ", ".join(f"{rate:g}" for rate in good)]))
    return lines


def area_table(grid: Grid, arms: Sequence[str]) -> list[str]:
    """Return a table of the areas over the rates and seeds that all `arms` have; a sentence without any.

    Only areas of all declared seeds have an interval.
    """
    rates, of = areas(grid, arms)
    if not of:
        return ["The arms have no two rates and no seed in common yet, so there is no area."]
    over = f"area over {', '.join(f'{rate:g}' for rate in rates)}"
    lines = []
    for arm, seeds in of.items():
        values = list(seeds.values())
        shown = "{:.2f} to {:.2f}".format(*bootstrap(values)) if len(values) == len(SEEDS) else ""
        lines.append([f"`{arm}`", f"{len(values)}", f"{statistics.fmean(values):.3f}", shown])
    return table(["arm", "seeds", over, "95 % interval, bootstrapped over seeds"], lines)


def contrast_table(found: Sequence[Contrast]) -> list[str]:
    """Return a table of the declared contrasts. Only complete ones have p values: others are descriptions."""
    if not found:
        return ["No declared contrast has runs of both arms yet."]
    head = ["contrast", "rates", "seeds", "difference of areas, 95 % t interval", "p", "Holm"]
    rows = []
    for c in found:
        tested = [shown_p(c.p), shown_p(c.holm)] if c.complete else ["not complete", "not complete"]
        counts = [f"{len(c.rates)}", f"{len(c.seeds)}", difference(c.differences)]
        rows.append([f"`{c.left}` - `{c.right}`", *counts, *tested])
    return table(head, rows)


def equivalence_table(grid: Grid) -> list[str]:
    """Return a table of the declared test of equivalence, empty without a seed of both arms.

    Only a complete one has a p value.
    """
    apart = list(equivalence_differences(grid).values())
    if not apart:
        return []
    whole = len(apart) == len(EQUIVALENCE_SEEDS)
    p = shown_p(equivalence(apart, MARGIN)) if whole else "not complete"
    name = f"`{EQUIVALENT[0]}` - `{EQUIVALENT[1]}`"
    head = ["equivalence", "rate", "seeds", "difference of endpoints, 95 % t interval", f"p, margin {MARGIN}"]
    return table(head, [[name, f"{EQUIVALENCE_RATE:g}", f"{len(apart)}", difference(apart), p]])


def draw(grid: Grid, rows: Sequence[Row], output: Path) -> None:
    """Draw the heat map of endpoints with the contour of SHARE, and beside it the rates that steps had."""
    figure = Figure(figsize=(15, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    left, *others = figure.subplots(1, 1 + len(SIZES), width_ratios=[1.5, *[1] * len(SIZES)])
    heat_map(left, grid)
    for axis, (title, metric) in zip(others, SIZES.items(), strict=True):
        for arm in grid:
            rates, values = line(rows, arm, metric)
            if rates:
                color, style = STYLES[arm]
                axis.plot(rates, values, style, color=color, label=arm, marker="o", markersize=3)
        axis.set(title=f"{title}, mean", xlabel="actor's learning rate", xscale="log", yscale="log")
        axis.set_xticks(list(RATES.values()), [f"{rate:g}" for rate in RATES.values()])
        axis.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
        axis.grid(alpha=0.3)
    others[-1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))  # beside the axes
    figure.savefig(output, format="png", dpi=90)


def heat_map(axis: Axes, grid: Grid) -> None:
    """Draw mean endpoints with numbers. A frame marks cells at SHARE of the best; empty cells have no run."""
    rates, arms, bar = list(RATES.values()), list(grid), SHARE * best_of(grid)
    values = np.full((len(arms), len(rates)), math.nan)
    for y, arm in enumerate(arms):
        for x, rate in enumerate(rates):
            if grid[arm].get(rate):
                values[y, x] = _mean(grid[arm][rate])
                ink = "black" if values[y, x] > BRIGHT else "white"
                axis.text(x, y, f"{values[y, x]:.2f}", ha="center", va="center", color=ink)
                if values[y, x] >= bar:
                    axis.add_patch(_frame(x, y))
    axis.imshow(values, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    axis.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates])
    axis.set_yticks(range(len(arms)), [named(arm, grid) for arm in arms])
    axis.set_title(f"exact match, iterations {WINDOW[0]} to {WINDOW[1]}; frame: {SHARE:.0%} of the best")
    axis.set_xlabel("actor's learning rate")


def named(arm: str, grid: Grid) -> str:
    """Return the label of an arm, with its numbers of seeds where a cell has less than the others.

    Example: "ess (1 to 2 seeds)", "ess (1 seed)".
    """
    counts = {len(cell) for cell in grid[arm].values()}
    most = max(len(cell) for cells in grid.values() for cell in cells.values())
    if counts == {most}:
        return arm
    low, high = min(counts), max(counts)
    return f"{arm} ({low if low == high else f'{low} to {high}'} seed{'s' if high > 1 else ''})"


def line(rows: Sequence[Row], arm: str, metric: str) -> tuple[list[float], list[float]]:
    """Return (rates, means over runs and iterations) of a metric of an arm."""
    found: dict[float, list[float]] = defaultdict(list)
    for row in rows:
        value = number(row, metric)
        if row["algorithm"] == arm and value is not None:
            found[RATES[row["setting"]]].append(value)
    return sorted(found), [statistics.fmean(found[rate]) for rate in sorted(found)]


def _frame(x: int, y: int) -> Rectangle:
    return Rectangle((x - 0.48, y - 0.47), 0.96, 0.94, fill=False, edgecolor="red", linewidth=2)


def _mean(cell: Mapping[int, float]) -> float:
    return statistics.fmean(cell.values())
