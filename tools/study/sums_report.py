"""Make the part of docs/study.md about the third task, whose turns are longer, from curves.parquet."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from tools.study.cells import Ends, arm_cells, counted, differences, ends, table, tested_cells
from tools.study.contrasts import SEEDS
from tools.study.lag_settings import SUMMED
from tools.study.matrix import LAG_ARMS

Row = dict[str, Any]
Place = tuple[float, int]  # rate and lag
Contrast = tuple[float, str, str]  # rate, left and right arm
PAIRS = (("s_ppo", "ppo"), ("st_ppo", "turn_ppo"), ("s_ppo", "open_loop_4"), ("st_ppo", "s_ppo"))
RATES = sorted({rate for rate, _ in SUMMED.values()})
# The declared contrasts, of the mean over LAGS.
CONTRASTS = [(rate, left, right) for rate in RATES for left, right in PAIRS]
LAGS = (0, 4)
BOUNDS = ("st_ppo_0.035", "st_ppo_0.006")
LIKE = (("st_ppo_0.006", "s_ppo_0.035"), ("st_ppo_0.006", "turn_ppo_0.006"), ("s_ppo_0.035", "s_ppo"))
# Families that were declared later: title, lags over which the mean is, contrasts.
LATER: tuple[tuple[str, Sequence[int], Sequence[Contrast]], ...] = (
    (
        "Declared when the results of `s_ppo` were known:",
        LAGS,
        [(3e-4, "s_ppo", "kl"), (6e-4, "s_ppo", "kl"), (6e-4, "s_ppo", "kl_low"), (6e-4, "kl_low", "kl")],
    ),
    (
        "Declared when the results of `s_ppo` and `kl` were known:",
        LAGS,
        [(3e-4, "s_ppo", "kl_low"), (3e-4, "kl_low", "kl")],
    ),
    (
        "`st_ppo` with narrower bounds of the ratio, named after them:",
        (0,),
        [(rate, arm, other) for rate in RATES for arm in BOUNDS for other in ("st_ppo", "s_ppo")],
    ),
    (
        "Declared when seed 5 of these was known: narrower bounds per token and without the correction:",
        (0,),
        [(rate, left, right) for rate in RATES for left, right in LIKE],
    ),
    (
        "Declared when all of these were known: the default with narrower bounds:",
        (0,),
        [(rate, "kl_low_0.035", other) for rate in RATES for other in ("kl_low", "s_ppo_0.035")],
    ),
)
KNOWN = 7  # the seed of which four results were known when the contrasts were declared


def sections(rows: Sequence[Row]) -> tuple[list[str], list[str]]:
    """Return the lines of the results and those of the appendix, none without runs."""
    if not rows:
        return [], []
    found = ends(rows, lambda setting: SUMMED[setting])
    places = list(SUMMED.values())
    head = ["arm", *(f"{rate:g}, lag {lag}" for rate, lag in places)]
    runs = {arm: sum(map(len, cells.values())) for arm, cells in found.items()}
    done, declared = sum(runs.get(arm, 0) for arm in LAG_ARMS), len(SUMMED) * len(LAG_ARMS) * len(SEEDS)
    counts = f"{done} of {declared} runs are finished"
    if later := [f"{runs[arm]} of `{arm}`" for arm in runs if arm not in LAG_ARMS]:
        counts += f". Runs that were declared later: {', '.join(later)}"
    lines = ["", "### Third task", "", f"{counts}. {turn_tokens(rows)}", ""]
    none = ["No declared contrast has runs of both arms at both lags yet."]
    lines += contrast_table(found, CONTRASTS) or none
    for title, lags, contrasts in LATER:
        if family := contrast_table(found, contrasts, lags):
            lines += ["", title, "", *family]
    cells = [arm_cells(arm, found[arm], places) for arm in found]
    return lines, ["", "Third task:", "", *table(head, cells)]


def turn_tokens(rows: Sequence[Row]) -> str:
    """Return a sentence about the mean length of a turn in the declared runs: of an iteration, the lowest and
    the highest."""
    declared = [r for r in rows if r["algorithm"] in LAG_ARMS and r["rollout/turns"]]
    of = [r["rollout/response_tokens"] / r["rollout/turns"] for r in declared]
    if not of:
        return "The runs have no turns."
    middle = statistics.fmean(of)
    return f"Tokens per turn: {middle:.0f} on average, {min(of):.0f} to {max(of):.0f} over the iterations."


def contrast_table(of: Ends[Place], contrasts: Sequence[Contrast], lags: Sequence[int] = LAGS) -> list[str]:
    """Return a table of contrasts of the mean over `lags`, nothing if no declared seed has all their runs.

    Holm's correction is over these contrasts. Only complete ones have p values: others are descriptions.
    """
    found = {}
    for rate, left, right in contrasts:
        over = [place for place in SUMMED.values() if place[0] == rate and place[1] in lags]
        if apart := differences(of, left, right, over):
            found[rate, left, right] = apart
    if not found:
        return []
    tested = tested_cells(found, len(contrasts))
    over_lags = f"lag {lags[0]}" if len(lags) == 1 else "mean of lags 0 and 4"
    head = ["contrast", "rate", f"{over_lags}: difference, 95 % t interval (seeds)", "p", "Holm"]
    rows = []
    for (rate, left, right), apart in found.items():
        others = [apart[seed] for seed in apart if seed != KNOWN]
        cells = [f"`{left}` - `{right}`", f"{rate:g}", counted(apart.values())]
        rows.append([*cells, *tested[rate, left, right], counted(others)])
    return table([*head, f"without seed {KNOWN}"], rows)
