"""The declared contrasts of a grid, computed from its results."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from megatron_stppo.evidence.compare.grid import Cell, ContrastFamily, Grid, Sides
from megatron_stppo.evidence.compare.results import Result
from megatron_stppo.evidence.compare.statistics import equivalence_p, holm, mean_interval, paired_p


@dataclass(frozen=True)
class Contrast:
    """Left minus right, paired by seed.

    Example: outcomes 0.6 and 0.8 on seeds 0 and 1 against 0.5 and 0.5: differences {0: 0.1, 1: 0.3}.
    """

    family: ContrastFamily
    label: str
    differences: dict[int, float] = field(default_factory=dict)  # by seed
    declared: int = 0  # seeds
    refused: str = ""  # why it is not computed
    p: float = math.nan  # only if all declared seeds have been run
    holm: float = math.nan  # p, adjusted for all contrasts of the family

    @property
    def effect(self) -> tuple[float, float]:
        """Mean difference and half of its 95 % t interval, paired by seed; NaN if there is none."""
        return mean_interval(list(self.differences.values())) if self.differences else (math.nan, math.nan)


def contrasts(grid: Grid, found: Mapping[Cell, Result]) -> list[Contrast]:
    """Return all declared contrasts, in order. A contrast whose cells ran on different devices is refused."""
    return [one for family in grid.contrasts for one in _of(grid, family, found)]


def _of(grid: Grid, family: ContrastFamily, found: Mapping[Cell, Result]) -> list[Contrast]:
    given = [_one(family, label, sides, found, grid) for label, sides in grid.declared(family)]
    complete = [n for n, one in enumerate(given) if one.differences and len(one.differences) == one.declared]
    margin = family.margin
    values = [list(given[n].differences.values()) for n in complete]
    ps = [paired_p(of) if margin is None else equivalence_p(of, margin) for of in values]
    for n, p, adjusted in zip(complete, ps, holm(ps, len(given)), strict=True):
        given[n] = replace(given[n], p=p, holm=adjusted)
    return given


def _one(
    family: ContrastFamily,
    label: str,
    sides: Sides,
    found: Mapping[Cell, Result],
    grid: Grid,
) -> Contrast:
    seeds = family.seeds or grid.seeds
    cells = {
        seed: [[Cell(arm, setting, seed) for setting in weights] for arm, weights in sides] for seed in seeds
    }
    whole = [seed for seed in seeds if all(cell in found for side in cells[seed] for cell in side)]
    devices = {found[cell].device for seed in whole for side in cells[seed] for cell in side}
    if len(devices) > 1:
        why = f"its cells ran on different devices ({'; '.join(sorted(devices))})"
        return Contrast(family, label, declared=len(seeds), refused=why)

    def mean(arm: str, weights: Mapping[str, float], seed: int) -> float:
        total = sum(weight * found[Cell(arm, setting, seed)].outcome for setting, weight in weights.items())
        return total / sum(weights.values())

    (left, right) = sides
    return Contrast(family, label, {s: mean(*left, s) - mean(*right, s) for s in whole}, len(seeds))
