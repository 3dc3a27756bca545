"""Make the part of docs/study.md about rollouts that lag: tables and figure from the rows of curves.parquet.

again_report.py makes the part about the runs on another CPU, sums_report.py that about the third task.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tools.study import again_report, sums_report
from tools.study.cells import SIZES, Ends, arm_cells, counted, differences, ends, number, table, tested_cells
from tools.study.figures import STYLES
from tools.study.lag_settings import LAGGED, LAGS, REPEATED, SUMMED
from tools.study.matrix import LAG_ARMS

Row = dict[str, Any]
PICTURE = "lags.png"
TITLES = {
    "": "old policy computed anew",
    "_behaviour": "old_policy: behaviour",
    "_truncate": "mismatch: truncate",
    "_mask": "mismatch: mask",
}
# The declared contrasts, each for two ways to see the lag, over the mean of these lags.
CONTRASTS = (("s_ppo", "ppo"), ("st_ppo", "turn_ppo"), ("s_ppo", "open_loop_4"))
TESTED, OVER = ("", "_behaviour"), (4, 8)


def sections(rows: Sequence[Row], folder: Path, shown: Path) -> tuple[list[str], list[str]]:
    """Return the lines of the results and those of the appendix, none without runs, and write the figure.

    shown: the folder in the document.
    """
    wrong = other_ages(rows)
    kept = [row for row in rows if _name(row) not in wrong]
    lagged = [row for row in kept if row["setting"] in LAGGED]
    lines, tables = _of_lags(lagged, folder, shown) if lagged else ([], [])
    if wrong:
        lines += ["", f"Left out, because trajectories had other ages than declared: {', '.join(wrong)}."]
    for report, settings in ((again_report, REPEATED), (sums_report, SUMMED)):
        own, more = report.sections([row for row in kept if row["setting"] in settings])
        lines, tables = lines + own, tables + more
    return lines, tables


def _of_lags(rows: Sequence[Row], folder: Path, shown: Path) -> tuple[list[str], list[str]]:
    runs = {_name(row) for row in rows}
    by_suffix = {suffix: ends(of_suffix(rows, suffix), _lag) for suffix in TITLES}
    tables = []
    for suffix, found in by_suffix.items():
        if found:
            head = [TITLES[suffix], *(f"lag {lag}" for lag in LAGS)]
            tables += ["", *table(head, [arm_cells(arm, found[arm], LAGS) for arm in found])]
    draw(rows, folder / PICTURE)
    lines = ["", "### Lag", "", f"{len(runs)} runs are finished, with the declared ages.", ""]
    return [*lines, f"![lags]({shown / PICTURE})", "", *contrast_table(by_suffix)], tables


def _lag(setting: str) -> int:
    return LAGGED[setting][0]


def of_suffix(rows: Sequence[Row], suffix: str) -> list[Row]:
    """Return the rows of the settings with this suffix. Example: "_mask" for lag_4_mask."""
    return [row for row in rows if LAGGED[row["setting"]][1] == suffix]


def other_ages(rows: Sequence[Row]) -> list[str]:
    """Return the names of the runs whose trajectories did not have the declared ages, or have none recorded.

    Iteration k trains on trajectories that are min(k - 1, lag) versions old.
    """
    lags = {name: lag for name, (lag, _) in (LAGGED | REPEATED).items()}
    lags |= {name: lag for name, (_, lag) in SUMMED.items()}
    return sorted(
        {
            _name(row)
            for row in rows
            if row["setting"] in lags
            and row["iteration"] > 0
            and {row["rollout/staleness"], row["rollout/staleness_max"]}
            != {min(row["iteration"] - 1, lags[row["setting"]])}
        }
    )


def _name(row: Row) -> str:
    return f"{row['setting']}-{row['algorithm']}-{row['seed']}"


def contrast_table(by_suffix: Mapping[str, Ends[int]]) -> list[str]:
    """Return a table of the declared contrasts over the declared seeds that have all their runs.

    Only complete ones have p values: others are descriptions. The last column has the same difference of the
    changes since lag 0, of the setting lag_0 for both ways to see the lag.
    """
    found = {
        (suffix, left, right): apart
        for suffix in TESTED
        for left, right in CONTRASTS
        if (apart := differences(by_suffix.get(suffix, {}), left, right, OVER))
    }
    if not found:
        return ["No declared contrast has runs of both arms at both lags yet."]
    tested = tested_cells(found, len(TESTED) * len(CONTRASTS))
    head = [
        "contrast",
        f"mean of lags {OVER[0]} and {OVER[1]}",
        "difference, 95 % t interval (seeds)",
        "p",
        "Holm",
        "change since lag 0",
    ]
    return table(
        head,
        [
            [
                f"`{left}` - `{right}`",
                TITLES[suffix],
                counted(apart.values()),
                *tested[suffix, left, right],
                counted(changes(by_suffix[suffix], by_suffix.get("", {}), left, right).values()),
            ]
            for (suffix, left, right), apart in found.items()
        ],
    )


def changes(of: Ends[int], before: Ends[int], left: str, right: str) -> dict[int, float]:
    """Return {seed: the difference of the arms over the lags of OVER, minus that of `before` at lag 0}.

    Example: endpoints 0.6 and 0.4 at lags 4 and 8 against 0.5 and 0.1 differ by 0.2; 0.7 and 0.6 at lag 0
    differ by 0.1. The change is 0.1.
    """
    since, at_start = differences(of, left, right, OVER), differences(before, left, right, (0,))
    return {seed: since[seed] - at_start[seed] for seed in since if seed in at_start}


def draw(rows: Sequence[Row], output: Path) -> None:
    """Draw a row of panels for each way to see the lag: the endpoint, the effective rate and ||C||."""
    suffixes = [suffix for suffix in TITLES if of_suffix(rows, suffix)]
    figure = Figure(figsize=(14, 0.5 + 3.6 * len(suffixes)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(suffixes), 1 + len(SIZES), squeeze=False)
    arms: dict[str, Any] = {}  # {arm: its line, for the legend}
    for (first, *others), suffix in zip(grid, suffixes, strict=True):
        own = of_suffix(rows, suffix)
        for arm, of in ends(own, _lag).items():
            places = [lag for lag in LAGS if lag in of]
            means = [statistics.fmean(of[lag].values()) for lag in places]
            arms[arm] = _plot(first, arm, places, means)
            for lag in places:
                first.scatter(
                    [LAGS.index(lag)] * len(of[lag]), list(of[lag].values()), s=8, color=STYLES[arm][0]
                )
        _frame(first, f"exact match, iterations 52 to 100; {TITLES[suffix]}")
        first.set_ylim(0, 1)
        for axis, (title, metric) in zip(others, SIZES.items(), strict=True):
            for arm in LAG_ARMS:
                _plot(axis, arm, *means_of(own, arm, metric))
            _frame(axis, f"{title}, mean; {TITLES[suffix]}")
            if axis.has_data():
                axis.set_yscale("log")
    figure.legend(arms.values(), arms, loc="outside lower center", ncols=len(arms))
    figure.savefig(output, format="png", dpi=90)


def means_of(rows: Sequence[Row], arm: str, metric: str) -> tuple[list[int], list[float]]:
    """Return (lags, means over runs and iterations) of a metric of an arm.

    A mean that is not positive is left out: a logarithmic axis cannot show it.
    """
    found: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        if row["algorithm"] == arm and (value := number(row, metric)) is not None:
            found[_lag(row["setting"])].append(value)
    means = {lag: statistics.fmean(found[lag]) for lag in sorted(found)}
    shown = [lag for lag, mean in means.items() if mean > 0 and not math.isnan(mean)]
    return shown, [means[lag] for lag in shown]


def _plot(axis: Axes, arm: str, lags: Sequence[int], values: Sequence[float]) -> Any:
    color, style = STYLES[arm]
    at = [LAGS.index(lag) for lag in lags]
    (drawn,) = axis.plot(at, values, style, color=color, marker="o", markersize=3)
    return drawn


def _frame(axis: Axes, title: str) -> None:
    axis.set_title(title, fontsize=9)
    axis.set_xlabel("age of the rollouts, iterations")
    axis.set_xticks(range(len(LAGS)), [f"{lag}" for lag in LAGS])
    axis.grid(alpha=0.3)
