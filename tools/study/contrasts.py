"""Statistics of the second round: the endpoint of a run, the area over learning rates, declared contrasts.

docs/study/protocol.md declares the contrasts. The functions take plain numbers; a `Grid` is
{arm: {rate: {seed: endpoint}}}.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

WINDOW = (52, 100)  # iterations whose evaluations are averaged, both included
RATES, SEEDS = 5, range(5, 10)  # of a complete grid: how many rates, and which seeds
EVERY = 2  # iterations between two evaluations
LEVEL = 0.05
CONTRASTS = (("s_ppo", "ppo"), ("st_ppo", "turn_ppo"), ("s_ppo", "open_loop"), ("s_ppo", "kl"))
SECOND_FAMILY = tuple((arm, "ppo") for arm in ("select_turn", "momentum_reset", "momentum_clock"))
SECOND_FAMILY += (("clipping_bias", "s_ppo"),)
LOWER_TARGET = (("kl_low", "kl"), ("s_ppo", "kl_low"))
AS_PRINTED = (("paper", "turn_ppo"), ("paper", "st_ppo"))
NARROWER = tuple(("st_ppo_0.035", right) for right in ("st_ppo", "s_ppo", "kl_low"))
FIRST = "First stage"
LATER = {  # families that were declared after CONTRASTS
    "Second family": SECOND_FAMILY,
    "A lower target of `kl`, declared when the results of the first stage were known": LOWER_TARGET,
    "The form that the paper prints": AS_PRINTED,
    "Narrower bounds of the ratio per turn": NARROWER,
}
# The declared test of equivalence: of endpoints at one rate.
EQUIVALENT, EQUIVALENCE_RATE, EQUIVALENCE_SEEDS, MARGIN = ("s_ppo", "open_loop"), 6e-4, range(5, 17), 0.05
RESAMPLES = 10_000
Grid = Mapping[str, Mapping[float, Mapping[int, float]]]


@dataclass(frozen=True)
class Contrast:
    """Area of `left` minus area of `right`, paired by seed. Only a complete one has p and holm, else NaN."""

    left: str
    right: str
    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    differences: tuple[float, ...]  # one per seed
    p: float = math.nan
    holm: float = math.nan  # p, adjusted for the number of declared contrasts

    @property
    def complete(self) -> bool:
        """Whether the declared rates and seeds have all been run."""
        return len(self.seeds) == len(SEEDS) and len(self.rates) >= RATES


def endpoint(exact_match: Mapping[int, float]) -> float:
    """Return the mean exact match over the evaluations of WINDOW, of {iteration: exact match}.

    An evaluation that is missing because the run ended before it counts as 0, and one that is missing before
    others is left out. Example: 0.5 at iterations 52 to 76 and nothing later: 13 of 25 evaluations, 0.26.
    """
    last = max(exact_match)
    due = [i for i in range(WINDOW[0], WINDOW[1] + 1, EVERY) if i in exact_match or i > last]
    return sum(exact_match.get(i, 0.0) for i in due) / len(due)


def area(endpoints: Mapping[float, float], best: float) -> float:
    """Return the integral of endpoint / best over log2 of the rate, divided by its range (trapezoids).

    Example: 0.8, 0.8, 0.4 at rates 1, 2, 4 and best 0.8: (1 + 0.75) / 2 octaves = 0.875.
    """
    rates = sorted(endpoints)
    octaves = math.log2(rates[-1] / rates[0])
    parts = ((endpoints[low] + endpoints[high]) / 2 * math.log2(high / low) for low, high in pairwise(rates))
    return sum(parts) / octaves / best


def best_of(grid: Grid) -> float:
    """Return the highest mean over seeds of any arm of the first stage and rate.

    The arms of LATER do not change the areas of the first stage.
    Without runs of that stage it is the highest of all.
    """
    later = {left for pairs in LATER.values() for left, _ in pairs} - {left for left, _ in CONTRASTS}
    first = {name: arm for name, arm in grid.items() if name not in later} or grid
    cells = [cell for arm in first.values() for cell in arm.values() if cell]
    return max(statistics.fmean(cell.values()) for cell in cells)


def areas(grid: Grid, arms: Sequence[str]) -> tuple[tuple[float, ...], dict[str, dict[int, float]]]:
    """Return (rates, {arm: {seed: area}}) over the rates and seeds that all these arms have.

    Empty if there are no arms, less than two such rates, or no such seed. The rates are chosen first: those
    at which every arm has a run.
    """
    if not arms:
        return (), {}
    rates = tuple(sorted(set.intersection(*({r for r, cell in grid[a].items() if cell} for a in arms))))
    if len(rates) < 2:
        return rates, {}
    seeds = set.intersection(*(set(grid[a][r]) for a in arms for r in rates))
    best = best_of(grid)
    found = {a: {s: area({r: grid[a][r][s] for r in rates}, best) for s in sorted(seeds)} for a in arms}
    return rates, found if seeds else {}


def contrasts(grid: Grid, pairs: Iterable[tuple[str, str]] = CONTRASTS) -> list[Contrast]:
    """Return the contrasts whose arms have runs; for complete ones p with Holm's adjustment over all that are
    declared.

    Only the seeds of SEEDS count, which were declared.
    """
    pairs = tuple(pairs)
    found = []
    for left, right in pairs:
        rates, of = areas(grid, (left, right)) if left in grid and right in grid else ((), {})
        if not of:
            continue
        seeds = tuple(seed for seed in of[left] if seed in SEEDS)
        if not seeds:
            continue
        apart = tuple(of[left][s] - of[right][s] for s in seeds)
        found.append(Contrast(left, right, rates, seeds, apart))
    tested = [paired_p(c.differences) for c in found if c.complete]
    ps, adjusted = iter(tested), iter(holm(tested, len(pairs)))
    return [replace(c, p=next(ps), holm=next(adjusted)) if c.complete else c for c in found]


def paired_p(differences: Sequence[float]) -> float:
    """Return the two-sided p of Student's t test that the mean difference is 0; NaN with less than two.

    Example: 1, 2, 3 have t = 2 / (1 / sqrt(3)) = 3.46 with 2 degrees of freedom, p = 0.074.
    """
    count = len(differences)
    if count < 2:
        return math.nan
    spread = statistics.stdev(differences)
    middle = abs(statistics.fmean(differences))
    if spread == 0:
        return 1.0 if middle == 0 else 0.0
    return student(middle * math.sqrt(count) / spread, count - 1)


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


def holm(values: Sequence[float], declared: int) -> list[float]:
    """Return p values adjusted by Holm's method for `declared` tests, of which some may not exist yet.

    Example: 0.01, 0.04 of two tests: 0.02 and 0.04.
    """
    adjusted, highest = [0.0] * len(values), 0.0
    for rank, place in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        highest = max(highest, min(1.0, (declared - rank) * values[place]))
        adjusted[place] = highest
    return adjusted


def bootstrap(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % percentile interval of the mean, of RESAMPLES samples of the seeds, with a fixed seed.

    Example: equal values give an interval without width.
    """
    drawn = np.random.default_rng(0).choice(np.asarray(values), (RESAMPLES, len(values)))
    low, high = np.quantile(drawn.mean(1), (0.025, 0.975))
    return float(low), float(high)


def equivalence_differences(grid: Grid) -> dict[int, float]:
    """Return {seed: endpoint of s_ppo minus endpoint of open_loop at 6e-4} of the declared seeds that exist.

    Example: 0.7 and 0.8 on seed 5 give {5: -0.1}.
    """
    left, right = (grid.get(arm, {}).get(EQUIVALENCE_RATE, {}) for arm in EQUIVALENT)
    return {seed: left[seed] - right[seed] for seed in EQUIVALENCE_SEEDS if seed in left and seed in right}


def equivalence(differences: Sequence[float], margin: float) -> float:
    """Return the p of two one-sided t tests that the mean difference lies inside +-margin; NaN with fewer
    than two values.

    Example: differences 0.01, 0.03 with margin 0.05: the mean is 0.02, its standard error 0.01; the nearer
    bound is 3 standard errors away, one-sided p = (1 - 2/pi atan(3)) / 2 = 0.102.
    """
    count = len(differences)
    if count < 2:
        return math.nan
    error = statistics.stdev(differences) / math.sqrt(count)
    room = margin - abs(statistics.fmean(differences))
    if error == 0:
        return 0.0 if room > 0 else 1.0
    half = student(abs(room) / error, count - 1) / 2
    return half if room > 0 else 1 - half
