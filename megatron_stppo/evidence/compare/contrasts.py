"""The declared contrasts of a grid, and their statistics: t intervals, t tests, adjustment by Holm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev

from megatron_stppo.evidence.compare.grid import Cell, ContrastFamily, Grid, Side, Sides
from megatron_stppo.evidence.compare.results import Found


@dataclass(frozen=True)
class Contrast:
    """Left minus right, paired by seed.

    Example: outcomes 0.6 and 0.8 on seeds 0 and 1 against 0.5 and 0.5: differences {0: 0.1, 1: 0.3}.
    """

    family: ContrastFamily
    label: str
    declared: int  # seeds
    differences: dict[int, float] = field(default_factory=dict)  # by seed
    refused: str = ""  # why it is not computed
    p: float = math.nan  # adjusted by Holm for all contrasts of the family; only if all seeds have been run

    @property
    def effect(self) -> tuple[float, float]:
        """Mean difference and half of its 95 % t interval, if there is a difference."""
        return mean_interval(list(self.differences.values()))


def contrasts(grid: Grid, found: Found) -> list[Contrast]:
    """Return all declared contrasts, in order. A contrast whose cells ran on different devices is refused."""
    return [one for family in grid.contrasts for one in _of(grid, family, found)]


def _of(grid: Grid, family: ContrastFamily, found: Found) -> list[Contrast]:
    given = [_one(family, label, sides, found, grid.seeds) for label, sides in grid.declared(family)]
    complete = [n for n, one in enumerate(given) if one.differences and len(one.differences) == one.declared]
    ps = [paired_p(list(given[n].differences.values())) for n in complete]
    for n, adjusted in zip(complete, holm(ps, len(given)), strict=True):
        given[n] = replace(given[n], p=adjusted)
    return given


def _one(family: ContrastFamily, label: str, sides: Sides, found: Found, seeds: list[int]) -> Contrast:
    of_seed = {s: [Cell(arm, setting, s) for arm, weights in sides for setting in weights] for s in seeds}
    whole = [seed for seed in seeds if all(cell in found for cell in of_seed[seed])]
    devices = {found[cell].device for seed in whole for cell in of_seed[seed]}
    if len(devices) > 1:
        why = f"its cells ran on different devices ({'; '.join(sorted(devices))})"
        return Contrast(family, label, len(seeds), refused=why)

    def mean(side: Side, seed: int) -> float:
        arm, weights = side
        total = sum(weight * found[Cell(arm, setting, seed)].outcome for setting, weight in weights.items())
        return total / sum(weights.values())

    left, right = sides
    return Contrast(family, label, len(seeds), {s: mean(left, s) - mean(right, s) for s in whole})


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
        low, high = (middle, high) if student(middle, freedom) > 0.05 else (low, middle)
    return high
