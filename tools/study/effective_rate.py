"""The effective rate of the first round's runs: learning rate after warm-up times mean correction scale.

If the correction only lowers the rate, runs with equal effective rates end at equal exact match, with a
correction or without.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from megatron_stppo.algorithm.variants import VARIANTS
from tools.study.figures import STYLES, table
from tools.study.matrix import BEFORE, CORRECTED, FAMILY, FORMS, PRINTED, SETTINGS, STRENGTH

Row = dict[str, Any]
ALGORITHMS = FAMILY | FORMS | STRENGTH | PRINTED | BEFORE  # of the first round, without the probes
MARKERS = {"gentle": "v", "harsh_2": "o", "harsh_2_half": "s", "harsh_2_once": "D"}
COMPARED = ("harsh_2", "harsh_2_half")  # settings that differ only in the rate
# {what the correction of a run does: colour}
KINDS = {
    "no correction": "#000000",
    "default correction": "#d55e00",
    "other strength, unit or estimator": "#0072b2",
    "no floor, or scale on the gradient": "#999999",
}
LIMITS, TICKS = (7e-5, 1e-3), (1e-4, 1.5e-4, 2e-4, 3e-4, 4.5e-4, 6e-4, 1e-3)  # learning rates
CURVES = {"harsh_2": CORRECTED, "gentle": CORRECTED}  # settings and algorithms
WIDTH = 5  # iterations per point of a curve


def levels() -> dict[str, list[str]]:
    """Return the algorithms by what their presets share."""
    found: dict[str, list[str]] = {}
    for name, fields in ALGORITHMS.items():
        preset = VARIANTS[fields["preset"]]
        with_critic = f"a ratio per {preset['segments']}, critic"
        level = with_critic if preset["advantage"] == "gae" else "groups, no critic"
        found.setdefault(level, []).append(name)
    return found


def effective_rate(row: Row) -> float:
    """Return the effective rate of a row of runs.csv.

    A scale on the gradient does not count: Adam cancels most of it. Example: a rate of 6e-4 and a mean scale
    of 0.5 give 3e-4.
    """
    on_gradient = ALGORITHMS[row["algorithm"]].get("correction_apply") == "gradient"
    rate: float = SETTINGS[row["setting"]]["update.actor.lr"]
    return rate if on_gradient else rate * row["correction_scale"]


def kind(algorithm: str) -> str:
    """Return the key of KINDS of an algorithm."""
    fields, (off, default, other, special) = ALGORITHMS[algorithm], KINDS
    if "correction" not in fields:
        return off
    if fields["correction_floor"] == 0 or fields["correction_apply"] == "gradient":
        return special
    return default if algorithm in CORRECTED else other


def compared(rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray]:
    """Return log2 of the effective rate and the final exact match, each [runs].

    The runs are those of the settings COMPARED in which only the size of single steps differs.
    """
    special = list(KINDS)[-1]
    own = [row for row in rows if row["setting"] in COMPARED and kind(row["algorithm"]) != special]
    return np.log2([effective_rate(row) for row in own]), np.array([row["final"] for row in own])


def correlation(rows: Sequence[Row]) -> float:
    """Return the correlation of the two columns of `compared`; NaN for less than 3 runs or equal values."""
    rates, final = compared(rows)
    enough = len(rates) > 2 and np.ptp(rates) > 0 and np.ptp(final) > 0
    return float(np.corrcoef(rates, final)[0, 1]) if enough else math.nan


def rate_table(rows: Sequence[Row]) -> list[str]:
    """Return a Markdown table of the correlations of each level; no lines if no level has enough runs."""
    head = ["runs", "number", "correlation of log effective rate and final exact match"]
    head += ["change of final exact match per doubled rate", "corrected runs alone", "their correlation"]
    lines = [_line(head), _line(["---"] * len(head))]
    for level, names in levels().items():
        own = [row for row in rows if row["algorithm"] in names]
        corrected = [row for row in own if "correction" in ALGORITHMS[row["algorithm"]]]
        if not math.isnan(correlation(own)):
            slope = np.polyfit(*compared(own), 1)[0]
            cells = [level, f"{len(compared(own)[0])}", f"{correlation(own):.2f}", f"{slope:+.2f}"]
            alone = "" if math.isnan(correlation(corrected)) else f"{correlation(corrected):.2f}"
            lines.append(_line([*cells, f"{len(compared(corrected)[0])}", alone]))
    return lines if len(lines) > 2 else []


def draw_effective_rate(rows: Sequence[Row], curves: Sequence[Row], output: Path) -> None:
    """Draw final exact match against effective rate, a point per run, and the effective rate over time."""
    figure = Figure(figsize=(13, 9), layout="constrained")
    FigureCanvasAgg(figure)
    *scatters, over_time = figure.subplots(2, 2).flat
    for axis, (level, names) in zip(scatters, levels().items(), strict=True):
        _scatter(axis, [row for row in rows if row["algorithm"] in names], level)
    _over_time(over_time, curves)
    handles = [Line2D([], [], ls="", marker="o", color=color, label=name) for name, color in KINDS.items()]
    for name, marker in MARKERS.items():
        label = f"{name} (rate {1e4 * SETTINGS[name]['update.actor.lr']:g}e-4)"
        handles.append(Line2D([], [], ls="", marker=marker, color="black", fillstyle="none", label=label))
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    figure.savefig(output, format="png", dpi=90)


def _scatter(axis: Axes, rows: Sequence[Row], level: str) -> None:
    for row in rows:
        color, marker = KINDS[kind(row["algorithm"])], MARKERS[row["setting"]]
        axis.plot(effective_rate(row), row["final"], marker, color=color, ms=6, alpha=0.7, mew=0)
    rates, final = compared(rows)
    if not math.isnan(correlation(rows)):
        ends = np.array([rates.min(), rates.max()])
        axis.plot(2**ends, np.polyval(np.polyfit(rates, final, 1), ends), "--", color="black", lw=0.8)
        level += f": r = {correlation(rows):.2f} over {len(rates)} runs"
    axis.set_title(level, fontsize=11)
    axis.set(ylabel="final exact match", ylim=(-0.03, 1))
    axis.set(xscale="log", xlim=LIMITS, xlabel="effective rate")
    _show_rates(axis, axis.xaxis)


def _over_time(axis: Axes, curves: Sequence[Row]) -> None:
    """Draw the mean over seeds, a point per WIDTH iterations, and the rates of COMPARED."""
    for setting, name in [(setting, name) for setting, names in CURVES.items() for name in names]:
        own = [row for row in curves if (row["setting"], row["algorithm"]) == (setting, name)]
        iterations, scales = table(own, "actor/correction_scale", WIDTH)
        line = "-" if setting == COMPARED[0] else ":"
        if len(iterations):
            rates = SETTINGS[setting]["update.actor.lr"] * scales.mean(0)
            axis.plot(iterations, rates, line, color=STYLES[name][0], label=f"{setting}, {name}")
    for setting in COMPARED:
        axis.axhline(SETTINGS[setting]["update.actor.lr"], color="black", lw=0.8, ls="--")
    axis.set_title(
        "effective rate during training (dashed: the rates of harsh_2 and half of it)", fontsize=11
    )
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=8, ncols=2)
    axis.set(yscale="log", ylim=LIMITS, ylabel="effective rate", xlabel="iteration")
    _show_rates(axis, axis.yaxis)


def _show_rates(axis: Axes, along: Axis) -> None:
    along.set_ticks(TICKS, [f"{1e4 * tick:g}e-4" for tick in TICKS])
    along.set_ticks([], minor=True)
    axis.grid(alpha=0.3)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
