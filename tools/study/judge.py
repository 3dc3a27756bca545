"""The definition of collapse, and statistics over a few seeds. The functions take plain numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

SHARE, PATIENCE = 0.5, 10  # in the definition of collapse
THRESHOLDS = (0.6, 0.9)  # of exact match, for the time to reach it
FINAL = 3  # evaluations at the end whose mean is the final exact match
Z = 1.959964  # the normal distribution's 0.975 quantile
# Student's t, 0.975 quantile, for 1 to 30 degrees of freedom.
T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def collapse_began(
    iterations: Sequence[int], exact_match: Sequence[float], share: float = SHARE, patience: int = PATIENCE
) -> int | None:
    """Return the iteration at which a collapse began, or None.

    It is the start of the first `patience` consecutive evaluations that are all below `share` of the best
    before them. Example, patience 2: for 0.8, 0.3, 0.5, 0.3, 0.2 at 0, 2, 4, 6, 8 it is 6; a value of 0.4 is
    not below.
    """
    best, row = 0.0, 0
    for place, value in enumerate(exact_match):
        row = row + 1 if value < share * best else 0
        if row == patience:
            return iterations[place - patience + 1]
        best = max(best, value)
    return None


def time_to(iterations: Sequence[int], exact_match: Sequence[float], threshold: float) -> int | None:
    """Return the first evaluated iteration at or above the threshold, or None."""
    return next((i for i, x in zip(iterations, exact_match, strict=True) if x >= threshold), None)


def wilson(count: int, total: int, z: float = Z) -> tuple[float, float]:
    """Return the Wilson score interval of a rate (E. B. Wilson, 1927), 95 % by default.

    With p = count / total:  (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n).
    Example: 1 of 4 with z = 2: (0.25 + 0.5 -+ 2 sqrt(0.046875 + 0.0625)) / 2 = 0.375 -+ 0.3307.
    """
    if total == 0:
        return 0.0, 1.0
    rate, extra = count / total, z * z / total
    middle, half = rate + extra / 2, z * math.sqrt(rate * (1 - rate) / total + extra / (4 * total))
    return max(0.0, (middle - half) / (1 + extra)), min(1.0, (middle + half) / (1 + extra))


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return (mean, half width of its 95 % t interval). The half width of a single value is NaN.

    Example: 1, 2, 3: 2 and 4.303 * 1 / sqrt(3) = 2.484.
    """
    if len(values) < 2:
        return (values[0] if values else math.nan), math.nan
    quantile = T[min(len(values) - 1, len(T)) - 1]
    return statistics.fmean(values), quantile * statistics.stdev(values) / math.sqrt(len(values))


def compare(left: Mapping[int, float], right: Mapping[int, float]) -> tuple[float, float, int, int]:
    """Compare left with right over their common seeds.

    Return (mean of left - right, half width of its 95 % t interval, seeds on which left is higher, seeds).
    Example: {0: 3, 1: 5, 2: 1} and {0: 1, 1: 1}: differences 2 and 4, so 3, 12.706, 2 of 2.
    """
    apart = [left[seed] - right[seed] for seed in sorted(left.keys() & right.keys())]
    return *mean_interval(apart), sum(x > 0 for x in apart), len(apart)


def median_time(times: Sequence[int | None]) -> float:
    """Return the median, where None means never: infinite if half of the times or more are None."""
    return statistics.median_high([math.inf if t is None else t for t in times]) if times else math.nan
