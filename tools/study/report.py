"""Make the tables and figures of docs/study/first-round.md, from runs.csv and steps.parquet."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tools.study.adapter_settings import ADAPTED
from tools.study.applied import gradient_table
from tools.study.collect import EXACT_MATCH, read_csv, read_parquet
from tools.study.effective_rate import MARKERS, draw_effective_rate, rate_table
from tools.study.figures import ESTIMATES, draw_curves, draw_estimates, pairs
from tools.study.judge import THRESHOLDS, compare, mean_interval, median_time, wilson
from tools.study.matrix import CONTROLS, CORRECTED, FAMILY, GROUPS, PILOT, SECOND_ROUND, SETTINGS

Row = dict[str, Any]
Finals = dict[str, dict[int, float]]  # {algorithm: {seed: final exact match}}
BEGIN, END = "<!-- begin: tools/stability_study.py -->\n", "<!-- end -->\n"
PAIRS = (
    "Final exact match of the row minus that of the column, on the same seeds: mean ± half of its 95 % "
    "interval, and on how many of the seeds the row is higher. Intervals without 0 are bold; they are not "
    "corrected for the number of pairs."
)
# {group, which the title names: algorithms of the family to compare it with}, for tables and figures.
TABLES: dict[str, tuple[str, ...]] = {
    "family": (),
    "forms": ("turn_ppo", "st_ppo"),
    "strength": ("turn_ppo", "s_ppo", "st_ppo"),
    "printed": ("turn_ppo", "st_ppo", "st_ppo_paper"),
    "before": CORRECTED,
}


def report(folder: Path, document: Path, made_of: Callable[[Path, Path], list[str]]) -> None:
    """Write the lines that `made_of` returns for `folder` between the marks of the document.

    A document that does not exist is written, with nothing else. Raises ValueError if the marks are missing.
    """
    text = document.read_text(encoding="utf-8") if document.exists() else BEGIN + END
    if BEGIN not in text or END not in text:
        raise ValueError(f"{document}: lacks the lines {BEGIN.strip()} and {END.strip()}; add them")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    lines = made_of(folder, folder.relative_to(document.parent))
    document.write_text(before + BEGIN + "\n".join(lines) + "\n" + END + after, encoding="utf-8")


def sections(folder: Path, shown: Path) -> list[str]:
    """Return Markdown lines. `shown` is the folder's path in the document."""
    rows, curves = (
        [row for row in given if row["setting"] not in {*SECOND_ROUND, *ADAPTED}]
        for given in (read_csv(folder / "runs.csv"), read_parquet(folder / "curves.parquet"))
    )
    if not rows:
        return ["No run has finished yet."]
    lines = [cost(rows), *pilot_table([row for row in rows if row["seed"] >= PILOT])]
    steps = read_parquet(folder / "steps.parquet")
    rows, curves, steps = ([row for row in given if row["seed"] < PILOT] for given in (rows, curves, steps))
    for setting in SETTINGS:
        own = [row for row in rows if row["setting"] == setting]
        of_setting = [row for row in curves if row["setting"] == setting]
        for title, beside in TABLES.items():
            there = [
                name for name in (*beside, *GROUPS[title]) if any(row["algorithm"] == name for row in own)
            ]
            if not any(name in GROUPS[title] for name in there):
                continue
            own_finals, label = finals(own, there), "" if title == "family" else f"-{title}"
            compared = {name: of for name, of in own_finals.items() if name in FAMILY}
            picture = f"{setting}{label}.png"
            draw_curves(of_setting, there, f"{setting}{label}", folder / picture)
            lines += ["", f"### `{setting}{label}`", "", *summary_table(own, there), ""]
            lines += [f"![curves]({shown / picture})", "", PAIRS, "", *pair_table(own_finals, compared)]
        if own and setting in CONTROLS:
            other = [row for row in rows if row["setting"] == CONTROLS[setting]]
            labelled = {
                f"{CONTROLS[setting]}, {name}": of for name, of in finals(other, list(FAMILY)).items()
            }
            pairs_of_both = pair_table(finals(own, list(FAMILY)), labelled)
            lines += ["", f"The same with the columns from `{CONTROLS[setting]}`:", "", *pairs_of_both]
    lines += mean_section(curves) + rate_section(
        [row for row in rows if row["setting"] in MARKERS], curves, folder, shown
    )
    if steps:
        draw_estimates(steps, folder / "estimators.png")
        lines += ["", "### Estimators of ||C||", "", *estimator_table(steps), ""]
        lines += [f"![estimators]({shown / 'estimators.png'})"]
        lines += ["", "### Correction scale by step of the iteration", "", *scale_table(steps)]
        lines += ["", "### Gradients and scales", "", *gradient_table(steps)]
    return lines


def mean_section(curves: Sequence[Row]) -> list[str]:
    """Return a table per setting: the family's pairs by the mean over a run's evaluations after its start."""
    lines = []
    for setting in SETTINGS:
        evaluated = [row for row in curves if row["setting"] == setting and row[EXACT_MATCH] is not None]
        found: Finals = {}
        for name in FAMILY:
            own = [row for row in evaluated if row["algorithm"] == name and row["iteration"] > 0]
            of = {
                seed: [r[EXACT_MATCH] for r in own if r["seed"] == seed] for seed in {r["seed"] for r in own}
            }
            found |= {name: {seed: statistics.fmean(x) for seed, x in of.items()}} if of else {}
        if found:
            lines += ["", f"#### Mean exact match at `{setting}`", "", *pair_table(found, found)]
    title = ["", "### Mean exact match over all iterations", "", PAIRS.replace("Final", "Mean", 1)]
    return title + lines if lines else []


def rate_section(rows: Sequence[Row], curves: Sequence[Row], folder: Path, shown: Path) -> list[str]:
    """Draw the figure of effective rates; return the lines of its section, none if there are too few runs."""
    correlations = rate_table(rows)
    if not correlations:
        return []
    draw_effective_rate(rows, curves, folder / "effective_rate.png")
    picture = f"![effective rate]({shown / 'effective_rate.png'})"
    return ["", "### Effective rate", "", *correlations, "", picture]


def cost(rows: Sequence[Row]) -> str:
    total, outside = (sum(row[name] for row in rows) for name in ("seconds", "seconds_outside"))
    return (
        f"{len(rows)} runs, {total / 3600:.1f} hours of one core. Of this time {outside / total:.0%} was "
        "spent on starting and ending processes (median "
        f"{statistics.median(row['seconds_outside'] for row in rows):.0f} s per run)."
    )


def pilot_table(rows: Sequence[Row]) -> list[str]:
    """Return a table of the runs that decided the harsh setting; no lines if there are none."""
    if not rows:
        return []
    head = ["setting", "run", "seed", "best", "final", "collapsed"]
    lines = ["", "### Choice of the harsh setting", "", _line(head), _line(["---"] * len(head))]
    for row in rows:
        cells = [row["setting"], f"`{row['algorithm']}`", f"{row['seed']}", f"{row['best']:.2f}"]
        lines.append(_line([*cells, f"{row['final']:.2f}", "yes" if row["collapsed"] else "no"]))
    return lines


def summary_table(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    """Return a row per algorithm: rates with Wilson intervals, means over seeds with t intervals, 95 %."""
    times = [f"iterations to {threshold}" for threshold in THRESHOLDS]
    head = [
        "algorithm",
        "seeds",
        "collapsed",
        "best exact match",
        "final exact match",
        "clip fraction",
        "KL to old",
    ]
    head += ["gradient norm: median, p95", "correction scale", *times, "s per update"]
    lines = [_line(head), _line(["---"] * len(head))]
    for name in names:
        own = [row for row in rows if row["algorithm"] == name]
        count = sum(row["collapsed"] for row in own)
        low, high = wilson(count, len(own))
        cells = [f"`{name}`", f"{len(own)}", f"{count} ({low:.2f} to {high:.2f})"]
        cells += [interval(own, "best"), interval(own, "final"), interval(own, "clip_fraction", 3)]
        cells += [interval(own, "kl_to_old", 4)]
        cells += [f"{_median(own, 'gradient_norm'):.2f}, {_median(own, 'gradient_norm_p95'):.2f}"]
        cells += [f"{_median(own, 'correction_scale'):.2f}"]
        cells += [_time([row[f"to_{threshold}"] for row in own]) for threshold in THRESHOLDS]
        lines.append(_line([*cells, f"{_median(own, 'seconds_update'):.2f}"]))
    return lines


def finals(rows: Sequence[Row], names: Sequence[str]) -> Finals:
    """Return the final exact match of every seed, for the algorithms that have runs."""
    of = {name: {row["seed"]: row["final"] for row in rows if row["algorithm"] == name} for name in names}
    return {name: seeds for name, seeds in of.items() if seeds}


def pair_table(rows: Finals, columns: Finals) -> list[str]:
    """Return a table of the row's final exact match minus the column's, on the same seeds."""
    lines = [_line(["", *(f"`{name}`" for name in columns)]), _line(["---"] * (len(columns) + 1))]
    for name, left in rows.items():
        cells = [_apart(left, right) if left is not right else "" for right in columns.values()]
        lines.append(_line([f"`{name}`", *cells]))
    return lines


def estimator_table(steps: Sequence[Row]) -> list[str]:
    """Return a table per setting and algorithm, over the steps with clipped tokens."""
    head = ["setting", "run", "steps", "steps that clip", "estimator", "correlation of logarithms"]
    head += ["ratio to exact: p10", "median", "p90"]
    lines = [_line(head), _line(["---"] * len(head))]
    for setting, name in sorted({(row["setting"], row["algorithm"]) for row in steps}):
        own = [row for row in steps if (row["setting"], row["algorithm"]) == (setting, name)]
        for label, metric in ESTIMATES.items():
            exact, estimate = pairs(own, metric)
            if len(exact) < 3:
                continue
            correlation = float(np.corrcoef(np.log(exact), np.log(estimate))[0, 1])
            ratios = np.quantile(estimate / exact, (0.1, 0.5, 0.9))
            spread = [f"{x:.2f}" for x in ratios] if label != "clip fraction" else [""] * 3
            cells = [setting, f"`{name}`", f"{len(own)}", f"{len(exact) / len(own):.0%}", label]
            lines.append(_line([*cells, f"{correlation:.2f}", *spread]))
    return lines


def scale_table(steps: Sequence[Row]) -> list[str]:
    """Return a table of scales per setting, algorithm and step of the iteration."""
    head = ["setting", "run", "step", "steps that clip", "tokens clipped, median"]
    head += ["scale: p10", "median", "p90", "mean"]
    lines = [_line(head), _line(["---"] * len(head))]
    for setting, name, place in sorted({(row["setting"], row["algorithm"], row["step"]) for row in steps}):
        own = [r for r in steps if (r["setting"], r["algorithm"], r["step"]) == (setting, name, place)]
        clipped = [r["actor/clip_fraction"] for r in own if r["actor/clip_fraction"] is not None]
        scales = [r["actor/correction_scale"] for r in own if r["actor/correction_scale"] is not None]
        if not clipped or not scales:  # every step was skipped
            continue
        share = sum(x > 0 for x in clipped) / len(clipped)
        cells = [setting, f"`{name}`", f"{place}", f"{share:.0%}", f"{statistics.median(clipped):.3f}"]
        cells += [f"{x:.3f}" for x in (*np.quantile(scales, (0.1, 0.5, 0.9)), statistics.fmean(scales))]
        lines.append(_line(cells))
    return lines


def interval(rows: Sequence[Row], name: str, digits: int = 2) -> str:
    """Return mean and interval. Example: "0.71 ± 0.05"."""
    middle, half = mean_interval([row[name] for row in rows if row[name] is not None])
    return f"{middle:.{digits}f}" + ("" if math.isnan(half) else f" ± {half:.{digits}f}")


def _apart(left: dict[int, float], right: dict[int, float]) -> str:
    middle, half, higher, seeds = compare(left, right)
    if seeds == 0:
        return ""
    shown = f"{middle:+.2f}" + ("" if math.isnan(half) else f" ± {half:.2f}")
    return f"{f'**{shown}**' if abs(middle) > half else shown} ({higher}/{seeds})"


def _time(times: Sequence[int | None]) -> str:
    """Return the median and the number of runs that reached it. Example: "6 (4/5)"."""
    middle = median_time(times)
    reached = sum(t is not None for t in times)
    return f"{'never' if math.isinf(middle) else f'{middle:.0f}'} ({reached}/{len(times)})"


def _median(rows: Sequence[Row], name: str) -> float:
    values = [row[name] for row in rows if row[name] is not None]
    return statistics.median(values) if values else math.nan


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
