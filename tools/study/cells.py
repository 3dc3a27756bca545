"""Functions that the reports of the second round share: table cells, numbers of rows, endpoints of runs."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from tools.study.collect import EXACT_MATCH
from tools.study.contrasts import SEEDS, endpoint, holm, paired_p
from tools.study.judge import mean_interval
from tools.study.matrix import ADDED_ARMS, ARMS, LAG_ARMS, NARROWED

Place, Key = TypeVar("Place", bound=Hashable), TypeVar("Key", bound=Hashable)
Ends = Mapping[str, Mapping[Place, Mapping[int, float]]]  # {arm: {place: {seed: endpoint}}}
# {title of a panel: what `number` returns}
SIZES = {"effective rate": "effective", "norm of C in the run's unit": "actor/clipping_bias_logit"}


def number(row: dict[str, Any], metric: str) -> float | None:
    """Return a metric of a row of curves.parquet, None if it is missing.

    `effective` is the learning rate that the steps had: actor/effective_lr, or, where the run has none, the
    learning rate times the mean scale of the correction.
    """
    if metric != "effective":
        return row[metric]  # type: ignore[no-any-return]
    if row["actor/effective_lr"] is not None or row["actor/lr"] is None:
        return row["actor/effective_lr"]  # type: ignore[no-any-return]
    return float(row["actor/lr"] * row["actor/correction_scale"])


def interval(values: Sequence[float]) -> str:
    """Return mean, half of the 95 % t interval, and count. Example: "0.71 ± 0.05 (5)"."""
    if not values:
        return ""
    middle, half = mean_interval(values)
    return f"{middle:.2f}" + ("" if math.isnan(half) else f" ± {half:.2f}") + f" ({len(values)})"


def difference(values: Sequence[float]) -> str:
    """Return mean and half of the 95 % t interval of differences. Example: "-0.025 ± 0.022"."""
    middle, half = mean_interval(values)
    return f"{middle:+.3f}" + ("" if math.isnan(half) else f" ± {half:.3f}")


def shown_p(p: float) -> str:
    """Return a p value with three decimals. Example: 0.00004 is "< 0.001"."""
    return f"{p:.3f}" if p >= 0.001 else "< 0.001"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    return [markdown(head), markdown(["---"] * len(head)), *(markdown(cells) for cells in rows)]


def markdown(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def ends(
    rows: Sequence[dict[str, Any]], place: Callable[[str], Place]
) -> dict[str, dict[Place, dict[int, float]]]:
    """Return {arm: {place: {seed: endpoint}}}, with the place of each setting, such as its lag."""
    curves: dict[tuple[str, Place, int], dict[int, float]] = defaultdict(dict)
    for row in rows:
        if row[EXACT_MATCH] is not None:
            at = row["algorithm"], place(row["setting"]), row["seed"]
            curves[at][row["iteration"]] = row[EXACT_MATCH]
    found: dict[str, dict[Place, dict[int, float]]] = {}
    for (arm, at, seed), curve in curves.items():
        found.setdefault(arm, {}).setdefault(at, {})[seed] = endpoint(curve)
    return {arm: found[arm] for arm in LAG_ARMS | ARMS | ADDED_ARMS | NARROWED if arm in found}


def differences(of: Ends[Place], left: str, right: str, over: Sequence[Place]) -> dict[int, float]:
    """Return {seed: mean endpoint of `left` over these places minus that of `right`}.

    Only of declared seeds that have all these runs. Example: endpoints 0.6 and 0.4 at the places 4 and 8
    against 0.5 and 0.1 give 0.2.
    """
    cells = [of.get(arm, {}).get(at, {}) for arm in (left, right) for at in over]
    shared = sorted(set.intersection(*(set(cell) for cell in cells)) & set(SEEDS))

    def mean(arm: str, seed: int) -> float:
        return statistics.fmean(of[arm][at][seed] for at in over)

    return {seed: mean(left, seed) - mean(right, seed) for seed in shared}


def counted(values: Iterable[float]) -> str:
    """Return a difference with its count. Example: "-0.025 ± 0.022 (5)"; nothing without values."""
    listed = list(values)
    return f"{difference(listed)} ({len(listed)})" if listed else ""


def arm_cells(arm: str, of: Mapping[Place, Mapping[int, float]], places: Sequence[Place]) -> list[str]:
    """Return the cells of a table's row: the arm's name, and for each place the interval over its seeds."""
    return [f"`{arm}`", *(interval(list(of.get(place, {}).values())) for place in places)]


def tested_cells(found: Mapping[Key, Mapping[int, float]], declared: int) -> dict[Key, list[str]]:
    """Return the cells p and Holm of each contrast, of {contrast: {seed: difference}}.

    Only contrasts with all declared seeds have p values: others are descriptions. Holm's correction is over
    `declared` tests, of which some may not exist yet.
    """
    complete = {key: paired_p(list(of.values())) for key, of in found.items() if len(of) == len(SEEDS)}
    adjusted = dict(zip(complete, holm(list(complete.values()), declared), strict=True))
    without = ["not complete", "not complete"]
    return {
        key: [shown_p(complete[key]), shown_p(adjusted[key])] if key in complete else without for key in found
    }
