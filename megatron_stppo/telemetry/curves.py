"""Draw curves.png from metrics.jsonl: rewards, stability, and the time of each phase.

To draw it again: `python -m megatron_stppo.telemetry.curves RUN_FOLDER`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from megatron_stppo.atomic_replace import replacing
from megatron_stppo.telemetry.rows import column, read

Rows = list[dict[str, Any]]
# (title of a panel, {column of metrics.jsonl: label}).
PANELS: tuple[tuple[str, dict[str, str]], ...] = (
    (
        "exact match",
        {
            "rollout/exact_match": "training tasks",
            "reward/mean": "reward",
            "evaluate/exact_match": "held out",
        },
    ),
    ("behaviour", {"rollout/called_tool": "called a tool", "rollout/valid_action_rate": "valid actions"}),
    (
        "action tokens clipped, share",
        {
            "actor/clip_fraction": "of all",
            "actor/clip_fraction_turn_1": "of first turns",
            "actor/clip_fraction_turn_last": "of last turns",
        },
    ),
    (
        "clipping-bias correction",
        {"actor/correction_scale": "scale", "actor/clipping_bias": "||C||"},
    ),
    ("KL, nats per token", {"kl/reference": "to the reference", "actor/kl_to_old": "to the old policy"}),
    ("entropy, nats per token", {"actor/entropy": "entropy"}),
    ("critic", {"critic/explained_variance": "explained variance", "critic/loss": "loss"}),
)
PREFIX = "seconds/"


def plot(metrics: Path, output: Path) -> None:
    """Draw the panels that have values. Raises FileNotFoundError if `metrics` does not exist."""
    rows = read(metrics)
    panels = [(title, names) for title, names in PANELS if any(column(rows, name)[0] for name in names)]
    figure = Figure(figsize=(16, 8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 4).flat
    for (title, names), axis in zip(panels, axes, strict=False):
        _lines(axis, title, names, rows)
    _phases(axes[len(panels)], rows)
    for axis in axes[len(panels) + 1 :]:
        axis.set_axis_off()
    figure.suptitle(f"{metrics.parent.name}: {rows[-1]['iteration']} iterations")
    with replacing(output) as scratch:
        figure.savefig(scratch, format="png", dpi=100)


def _lines(axis: Axes, title: str, names: dict[str, str], rows: Rows) -> None:
    for name, label in names.items():
        iterations, values = column(rows, name)
        if iterations:
            marker = "o" if len(iterations) < 10 or name.startswith("evaluate/") else ""
            axis.plot(iterations, values, label=label, marker=marker, markersize=4, linewidth=1.5)
    _frame(axis, title)


def _phases(axis: Axes, rows: Rows) -> None:
    """Draw the seconds of each phase as stacked areas. Phases under 1 % of the time share one area."""
    timed = [row for row in rows if "seconds" in row]
    total = sum(row["seconds"] for row in timed) or 1.0
    names = sorted({name for row in timed for name in row if name.startswith(PREFIX)})
    sums = {name: sum(row.get(name) or 0.0 for row in timed) for name in names}
    large = sorted((name for name in names if sums[name] >= 0.01 * total), key=lambda name: -sums[name])
    small = [name for name in names if name not in large]
    areas = [[row.get(name) or 0.0 for row in timed] for name in large]
    labels = [f"{name.removeprefix(PREFIX)} {sums[name] / total:.0%}" for name in large]
    if small:
        areas.append([sum(row.get(name) or 0.0 for name in small) for row in timed])
        labels.append(f"the rest {sum(sums[name] for name in small) / total:.0%}")
    if timed:
        axis.stackplot([row["iteration"] for row in timed], areas, labels=labels, alpha=0.85)
    _frame(axis, "seconds per iteration")


def _frame(axis: Axes, title: str) -> None:
    axis.set_title(title)
    axis.set_xlabel("iteration")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(alpha=0.3)
    if axis.get_legend_handles_labels()[1]:
        axis.legend(fontsize=8)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    plot(folder / "metrics.jsonl", folder / "curves.png")
