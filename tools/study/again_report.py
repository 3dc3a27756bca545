"""Make the part of docs/study.md about lag 8 on another CPU, with `mismatch` and with the present default.

The tables are made from the rows of curves.parquet.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from tools.study.cells import Ends, arm_cells, counted, ends, number, table, tested_cells
from tools.study.contrasts import SEEDS
from tools.study.lag_settings import REPEATED

Row = dict[str, Any]
Place = tuple[int, str]  # lag and what sees it: the value of REPEATED
Cell = tuple[str, str]  # an algorithm, and a suffix of CORRECTIONS
Pair = tuple[Cell, Cell]
# "anew": nothing sees it. The old policy is computed anew, as with `truncate` and `mask`.
TITLES = {"": "anew", "_behaviour": "`behaviour`", "_truncate": "`truncate`", "_mask": "`mask`"}
LAG = 8
ARMS = ("ppo", "s_ppo", "st_ppo", "kl_low")
DECLARED = 75  # runs
# {caption: a declared family, which has Holm's correction over its contrasts}
FAMILIES: dict[str, list[Pair]] = {
    "`truncate` and no `mismatch`": [((arm, "_truncate"), (arm, "")) for arm in ARMS],
    "`kl_low`, the default, and the others": [
        ((left, suffix), (right, suffix))
        for left, right in (("s_ppo", "kl_low"), ("kl_low", "ppo"))
        for suffix in ("", "_behaviour")
    ],
    "`mask` and no `mismatch`": [((arm, "_mask"), (arm, "")) for arm in ARMS],
}
# Not tested: comparisons of the lag stage that these runs repeat.
DESCRIBED: list[Pair] = [(("s_ppo", suffix), ("ppo", suffix)) for suffix in ("", "_behaviour")]


def sections(rows: Sequence[Row]) -> tuple[list[str], list[str]]:
    """Return the lines of the results and those of the appendix, none without runs."""
    if not rows:
        return [], []
    found = ends(rows, lambda setting: REPEATED[setting])
    runs = sum(len(seeds) for places in found.values() for seeds in places.values())
    lines = ["", "### Lag 8 again, on the AMD EPYC", ""]
    lines += [f"{runs} runs are finished, with the declared ages; {DECLARED} were declared."]
    for caption, family in FAMILIES.items():
        if of := contrast_table(found, family, tested=True):
            lines += ["", f"{caption} (Holm's correction over {len(family)} contrasts):", "", *of]
    if of := contrast_table(found, DESCRIBED, tested=False):
        lines += ["", "Contrasts of the [lag stage](#lag) again, on other models; not tested:", "", *of]
    places = sorted({place for of in found.values() for place in of}, key=list(REPEATED.values()).index)
    head = ["lag again", *(f"lag {lag}, {TITLES[suffix]}" for lag, suffix in places)]
    tables = ["", *table(head, [arm_cells(arm, found[arm], places) for arm in found])]
    tables += ["", *table(["mean effective rate", *head[1:]], _rates(rows, list(found), places))]
    return lines, tables


def contrast_table(of: Ends[Place], contrasts: Sequence[Pair], tested: bool) -> list[str]:
    """Return a table of contrasts at lag 8, nothing if none has runs of both cells.

    tested: with p values, for contrasts that have all declared seeds, and Holm's correction over `contrasts`.
    """
    found = {pair: apart for pair in contrasts if (apart := differences(of, *pair))}
    if not found:
        return []
    head = ["contrast at lag 8", "difference, 95 % t interval (seeds)", *(["p", "Holm"] if tested else [])]
    more = tested_cells(found, len(contrasts)) if tested else {key: [] for key in found}
    return table(head, [[named(*x), counted(found[x].values()), *more[x]] for x in found])


def named(left: Cell, right: Cell) -> str:
    """Examples: "`ppo`: `mask` - off" and "`s_ppo` - `ppo`: `behaviour`"."""
    (arm, seen), (other, _) = left, right
    if arm == other:  # the right one has no `mismatch`
        return f"`{arm}`: {TITLES[seen]} - off"
    return f"`{arm}` - `{other}`: {TITLES[seen]}"


def differences(of: Ends[Place], left: Cell, right: Cell) -> dict[int, float]:
    """Return {seed: endpoint of the left cell minus that of the right one}, of declared seeds with both."""
    ours, theirs = (of.get(arm, {}).get((LAG, suffix), {}) for arm, suffix in (left, right))
    return {seed: ours[seed] - theirs[seed] for seed in SEEDS if seed in ours and seed in theirs}


def _rates(rows: Sequence[Row], arms: Sequence[str], places: Sequence[Place]) -> list[list[str]]:
    """Return a row per algorithm: the mean effective rate over iterations and runs of each place."""
    found: dict[tuple[str, Place], list[float]] = defaultdict(list)
    for row in rows:
        if (value := number(row, "effective")) is not None:
            found[row["algorithm"], REPEATED[row["setting"]]].append(value)

    def cell(arm: str, place: Place) -> str:
        of = found.get((arm, place))
        return f"{statistics.fmean(of):.1e}" if of else ""

    return [[f"`{arm}`", *(cell(arm, place) for place in places)] for arm in arms]
