"""The share of each gradient that Adam applies when scales multiply single steps, and which steps are scaled.

Adam's first moment m_j = sum_{i <= j} (1 - beta1) beta1^(j - i) g_i contains the gradient g_i from step i on.
`correction_apply: step` multiplies the change of step j by its scale s_j. So, apart from Adam's second
moment, g_i is applied with the share
    a_i = sum_{j >= i} (1 - beta1) beta1^(j - i) s_j,
which is 1 if no step is scaled. The scale s_i of the gradient's own step has a weight of 1 - beta1 = 0.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tools.study.matrix import ALGORITHMS

Row = dict[str, Any]
BETA1 = 0.9  # of the runs (update.actor.betas)
FOLLOWING = 50  # steps that must follow a step, so that its share is complete but for 0.9^50 = 0.5 %
HEAD = (
    "setting", "run", "mean scale of steps that clip", "of other steps",
    "mean share applied of gradients of steps that clip", "of other steps",
    "correlation of log norm and log of the run's norm of C", "of log norm and log absolute norm of C",
    "median scale in the lowest quarter of norms", "in the highest",
)  # fmt: skip


def applied_shares(scales: np.ndarray, beta1: float = BETA1) -> np.ndarray:
    """Return the share of each gradient that the optimizer applies, as if no step came after the last one.

    scales: those of all steps, in order. Example, beta1 0.5: of the scales 0, 1, 1 the first gradient has
    0.5 * 0 + 0.25 * 1 + 0.125 * 1 = 0.375, the second one 0.75, the third one 0.5.
    """
    shares, later = np.empty(len(scales)), 0.0
    for step in reversed(range(len(scales))):
        later = shares[step] = (1 - beta1) * scales[step] + beta1 * later
    return shares


def gradient_table(steps: Sequence[Row]) -> list[str]:
    """Return a Markdown table with a row per setting and probe. Norms are of gradients before scaling.

    The last columns are over the steps that clip, the shares over all but the last FOLLOWING steps.
    """
    lines = [_line(HEAD), _line(["---"] * len(HEAD))]
    for setting, name in sorted({(row["setting"], row["algorithm"]) for row in steps}):
        own = [row for row in steps if (row["setting"], row["algorithm"]) == (setting, name)]
        relative = ALGORITHMS[name].get("correction_unit") == "relative"
        lines.append(_line([setting, f"`{name}`", *_shares(own), *_norms(own, relative)]))
    return lines


def _shares(rows: Sequence[Row]) -> list[str]:
    """Return the cells of scales and shares, over all seeds of a run.

    Steps that were skipped are left out: Adam did not move there.
    """
    scales, shares, clips = [], [], []
    for seed in sorted({row["seed"] for row in rows}):
        of_run = (r for r in rows if r["seed"] == seed and r["actor/correction_scale"] is not None)
        own = sorted(of_run, key=lambda r: (r["iteration"], r["step"]))
        of_seed = _column(own, "actor/correction_scale")
        kept = slice(max(len(own) - FOLLOWING, 1))
        scales.append(of_seed[kept])
        shares.append(applied_shares(of_seed)[kept])
        clips.append(_column(own, "actor/clip_fraction")[kept] > 0)
    clip = np.concatenate(clips)
    cells = [np.concatenate(values)[where] for values in (scales, shares) for where in (clip, ~clip)]
    return [f"{cell.mean():.2f}" if len(cell) else "" for cell in cells]


def _norms(rows: Sequence[Row], relative: bool) -> list[str]:
    """Return the cells of correlations and scales. relative: whether the run divides the norm of C."""
    norm, bias = _column(rows, "actor/gradient_norm"), _column(rows, "actor/clipping_bias_gradient")
    clip = (_column(rows, "actor/clip_fraction") > 0) & (norm > 0) & (bias > 0)
    norm, bias, scale = norm[clip], bias[clip], _column(rows, "actor/correction_scale")[clip]
    if len(norm) < 3:
        return [""] * 4
    absolute = _correlation(norm, bias * norm) if relative else ""
    low, high = np.quantile(norm, (0.25, 0.75))
    of_quarters = [f"{np.median(scale[where]):.3f}" for where in (norm <= low, norm >= high)]
    return [_correlation(norm, bias), absolute, *of_quarters]


def _correlation(left: np.ndarray, right: np.ndarray) -> str:
    """Return the cell of the correlation of two logarithms, which is empty if one of them does not vary."""
    varies = np.ptp(left) > 0 and np.ptp(right) > 0
    return f"{np.corrcoef(np.log(left), np.log(right))[0, 1]:.2f}" if varies else ""


def _column(rows: Sequence[Row], name: str) -> np.ndarray:
    """Return a metric of the steps, as floats. A step that was skipped has NaN."""
    return np.array([row[name] for row in rows], dtype=float)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
