"""Figures of the study, drawn from the rows of curves.parquet and steps.parquet."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

Row = dict[str, Any]
# (title, metric, number of iterations averaged per point, whether the axis is logarithmic)
PANELS = (
    ("held-out exact match", "evaluate/exact_match", 1, False),
    ("action tokens clipped, share", "actor/clip_fraction", 5, False),
    ("KL to the old policy, nats per token", "actor/kl_to_old", 5, True),
    ("gradient norm", "actor/gradient_norm", 5, True),
)
CUT = 30.0  # a logarithmic axis ends at this multiple of the median: one run must not flatten the others
# Colour (of Okabe and Ito, suitable for colour-blind readers) and line. In the family a colour stands for a
# ratio and an advantage; solid lines have our correction, dotted ones the paper's printed form.
STYLES = {
    "ppo": ("#0072b2", "--"),
    "turn_ppo": ("#d55e00", "--"),
    "s_ppo": ("#0072b2", "-"),
    "st_ppo": ("#d55e00", "-"),
    "st_ppo_paper": ("#000000", ":"),
    "grpo": ("#009e73", "--"),
    "so_grpo": ("#009e73", "-"),
    "st_ppo_coefficient": ("#56b4e9", "-"),
    "st_ppo_gradient": ("#cc79a7", "-"),
    "st_ppo_floor_0": ("#e69f00", "-"),
    "st_ppo_unit_mean": ("#0072b2", "-"),
    "st_ppo_on_gradient": ("#999999", "-"),
    "st_ppo_strength_1": ("#d55e00", "-."),
    "st_ppo_strength_3": ("#e69f00", "-"),
    "st_ppo_strength_30": ("#cc79a7", "-"),
    "st_ppo_paper_floor_1": ("#56b4e9", ":"),
    "st_ppo_paper_on_step": ("#009e73", ":"),
    "s_ppo_sum": ("#0072b2", ":"),
    "st_ppo_sum": ("#d55e00", ":"),
    "so_grpo_sum": ("#009e73", ":"),
    "s_ppo_strength_1": ("#0072b2", "-."),
    "open_loop": ("#009e73", "-"),
    "open_loop_4": ("#009e73", "-"),
    "kl": ("#cc79a7", "-"),
    "kl_low": ("#cc79a7", "--"),
    "paper": ("#000000", ":"),
    "st_ppo_0.035": ("#d55e00", ":"),
    "ess": ("#e69f00", "-"),
    "select_turn": ("#56b4e9", "-"),
    "momentum_reset": ("#000000", "--"),
    "momentum_clock": ("#999999", "--"),
    "clipping_bias": ("#0072b2", ":"),
}
EXACT = "actor/clipping_bias_gradient"
ESTIMATES = {
    "logit": "actor/clipping_bias_logit",
    "coefficient": "actor/clipping_bias_coefficient",
    "clip fraction": "actor/clip_fraction",
}


def draw_curves(rows: Sequence[Row], algorithms: Sequence[str], title: str, output: Path) -> None:
    """Draw the mean over seeds of each algorithm, with a band from the minimum to the maximum."""
    figure = Figure(figsize=(13, 8), layout="constrained")
    FigureCanvasAgg(figure)
    for axis, (name, metric, width, logarithmic) in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
        means = []
        for algorithm in algorithms:
            own = [row for row in rows if row["algorithm"] == algorithm]
            iterations, values = table(own, metric, width)
            if len(iterations):
                color, line = STYLES[algorithm]
                means.append(values.mean(0))
                axis.plot(iterations, values.mean(0), line, label=algorithm, color=color, linewidth=1.8)
                axis.fill_between(iterations, values.min(0), values.max(0), color=color, alpha=0.08, lw=0)
        _frame(axis, name, "iteration", logarithmic)
        if logarithmic and means:
            axis.set_ylim(*cut(np.concatenate(means), *axis.get_ylim()))
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=7)
    figure.suptitle(title)
    figure.savefig(output, format="png", dpi=90)


def table(rows: Sequence[Row], metric: str, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (iterations [I], values [seeds, I]) of iterations that all seeds have, averaged by `width`.

    Example, width 2: iterations 1, 2, 3, 4 with 1, 3, 5, 7 give [1.5, 3.5] and [[2, 6]].
    """
    found: dict[int, dict[int, float]] = defaultdict(dict)
    for row in rows:
        if row[metric] is not None:
            found[row["seed"]][row["iteration"]] = row[metric]
    if not found:
        return np.empty(0), np.empty((0, 0))
    shared = sorted(set.intersection(*(set(own) for own in found.values())))
    shared = shared[: len(shared) // width * width]
    values = np.array([[own[i] for i in shared] for own in found.values()])
    return np.array(shared).reshape(-1, width).mean(1), values.reshape(len(found), -1, width).mean(2)


def cut(values: np.ndarray, low: float, high: float) -> tuple[float, float]:
    """Return the limits of a logarithmic axis inside [low, high].

    They are the median of the positive values, divided and multiplied by CUT; [low, high] if no value is
    positive. Example: of 1, 1, 1, 1e-9 inside [1e-9, 2] they are 1 / 30 and 2.
    """
    positive = values[values > 0]
    if not len(positive):
        return low, high
    middle = float(np.median(positive))
    return max(low, middle / CUT), min(high, middle * CUT)


def draw_estimates(rows: Sequence[Row], output: Path) -> None:
    """Draw the estimate against the exact norm, for every step of the probes with clipped tokens."""
    names = sorted({row["algorithm"] for row in rows})
    figure = Figure(figsize=(13, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    for axis, (label, metric) in zip(figure.subplots(1, 3), ESTIMATES.items(), strict=True):
        for name in names:
            exact, estimate = pairs([row for row in rows if row["algorithm"] == name], metric)
            axis.scatter(exact, estimate, s=8, alpha=0.5, label=name, linewidths=0)
        low, high = axis.get_xlim()
        if label != "clip fraction":
            axis.plot([low, high], [low, high], color="black", linewidth=0.8)
        _frame(axis, label, "exact ||C||", True)
        axis.set_xscale("log")
    axis.legend(fontsize=8)
    figure.savefig(output, format="png", dpi=90)


def pairs(rows: Sequence[Row], metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (exact norms, estimates) of the steps at which both are positive."""
    both = [(row[EXACT], row[metric]) for row in rows if (row[EXACT] or 0) > 0 and (row[metric] or 0) > 0]
    exact, estimate = np.array(both, dtype=float).reshape(-1, 2).T
    return exact, estimate


def _frame(axis: Axes, title: str, below: str, logarithmic: bool) -> None:
    axis.set_title(title)
    axis.set_xlabel(below)
    axis.grid(alpha=0.3)
    if logarithmic and axis.has_data():
        axis.set_yscale("log")
