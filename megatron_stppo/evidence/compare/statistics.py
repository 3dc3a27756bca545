"""Statistics of paired differences: t tests, adjustment by Holm, equivalence. They take plain numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

LEVEL = 0.05


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return (mean, half of its 95 % t interval); NaN as the half of a single value.

    Example: 1, 2, 3: 2 and 4.303 * 1 / sqrt(3) = 2.484.
    """
    if len(values) < 2:
        return fmean(values), math.nan
    return fmean(values), quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))


def paired_p(differences: Sequence[float]) -> float:
    """Return the two-sided p of Student's t test that the mean difference is 0; NaN with fewer than two.

    Example: 1, 2, 3 have t = 2 / (1 / sqrt(3)) = 3.46 with 2 degrees of freedom, p = 0.074.
    """
    count = len(differences)
    if count < 2:
        return math.nan
    spread, middle = stdev(differences), abs(fmean(differences))
    if spread == 0:
        return 1.0 if middle == 0 else 0.0
    return student(middle * math.sqrt(count) / spread, count - 1)


def equivalence_p(differences: Sequence[float], margin: float) -> float:
    """Return the p of two one-sided t tests that the mean difference is inside +-margin; NaN with fewer than
    two values.

    Example: 0.01, 0.03 with margin 0.05: the mean is 0.02 and its standard error 0.01, so that the nearer
    bound is 3 standard errors away: p = (1 - 2/pi atan(3)) / 2 = 0.102.
    """
    count = len(differences)
    if count < 2:
        return math.nan
    error = stdev(differences) / math.sqrt(count)
    room = margin - abs(fmean(differences))
    if error == 0:
        return 0.0 if room > 0 else 1.0
    half = student(abs(room) / error, count - 1) / 2
    return half if room > 0 else 1 - half


def holm(values: Sequence[float], declared: int) -> list[float]:
    """Return p values adjusted by Holm's method for `declared` tests, of which some may not exist yet.

    Example: 0.01, 0.04 of two tests: 0.02 and 0.04.
    """
    adjusted, highest = [0.0] * len(values), 0.0
    for rank, place in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        highest = max(highest, min(1.0, (declared - rank) * values[place]))
        adjusted[place] = highest
    return adjusted


def student(t: float, freedom: int) -> float:
    """Return P(|T| > t) of Student's t with this many degrees of freedom.

    The closed forms of Abramowitz and Stegun, 26.7.3 and 26.7.4, with tan(angle) = t / sqrt(freedom).
    Example: one degree of freedom and t = 1: 1 - 2/pi * pi/4 = 0.5.
    """
    angle = math.atan(t / math.sqrt(freedom))
    cosine, odd = math.cos(angle) ** 2, freedom % 2
    term, total = 1.0, 0.0
    for k in range(1 + odd, freedom, 2):  # cos^0, cos^2, ... with the factors 1, 1/2, 3/8 or 1, 2/3, 8/15
        total += term
        term *= cosine * k / (k + 1)
    if odd:
        return 1 - 2 / math.pi * (angle + (math.sin(angle) * math.cos(angle) * total if freedom > 1 else 0.0))
    return 1 - math.sin(angle) * total


def quantile(freedom: int) -> float:
    """Return t with P(|T| > t) = 0.05, by bisection. Example: 12.706 with one degree of freedom."""
    low, high = 1.0, 16.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if student(middle, freedom) > LEVEL else (low, middle)
    return high
