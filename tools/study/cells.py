"""What the parts of the second round's report share: cells of tables, and numbers of rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tools.study.judge import mean_interval

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
