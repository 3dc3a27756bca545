"""Derivatives along a direction, from finite differences, compared with a gradient.

With u the direction and w+ = round(w + h u), w- = round(w - h u) in float32, the central difference
is D = (f(w+) - f(w-)) / 2h, and the gradient's value E = <g, w+ - w-> / 2h. So the rounding of weights is in
both. D - E = c h^2 + noise / h for a right gradient. It is computed for steps h that are each a quarter of
the step before, and extrapolated to h = 0 (Richardson). The larger difference
between three steps estimates its error. The steps are small, because objectives with clipping have kinks, and
every kink between w- and w+ adds to the difference. A step may not change the objective by more than CHANGE
of its scale, going by the gradient: far away everything is clipped, and the objective is flat.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron_stppo.evidence.layouts.counted import Counted, Piece

STEPS = 6  # at most
FACTOR = 4  # between two steps
# Largest allowed difference of the slopes, relative to the larger one, besides the estimated errors.
SHARE, ERRORS = 0.02, 3.0
COARSE = 0.3  # a slope with a larger tolerance, relative to itself, is not judged
FIRST = 4e-3  # norm of the first step / norm of the part's weights
CHANGE = 0.1  # of the objective by the first step, relative to its scale
NOISE = 1e-7  # of f, relative to its scale


@dataclass(frozen=True)
class Slope:
    """The derivative of f along a direction.

    Example: Slope(2.0, 2.001, 0.003): finite differences say 2.001 +- 0.003, the gradient says 2.
    """

    gradient: float
    measured: float
    error: float  # estimated, of `measured`

    @property
    def size(self) -> float:
        return max(abs(self.gradient), abs(self.measured))

    @property
    def tolerance(self) -> float:
        return SHARE * self.size + ERRORS * self.error

    @property
    def judged(self) -> bool:
        """Whether the finite differences are accurate enough, or f does not change at all."""
        return self.size == 0 or self.tolerance <= COARSE * self.size

    @property
    def holds(self) -> bool:
        return not self.judged or self.used <= 1

    @property
    def used(self) -> float:
        """The difference, in tolerances."""
        difference = abs(self.measured - self.gradient)
        return difference / self.tolerance if difference else 0.0


@dataclass(frozen=True)
class Direction:
    """The weights w + h u of some pieces of a model."""

    counted: Counted
    pieces: Sequence[Piece]
    u: Sequence[Tensor]  # of each piece, of any length
    gradient: Sequence[Tensor]  # g of each piece

    def slope(self, f: Callable[[], float], scale: float) -> Slope:
        """Return the derivative of f along u / |u|. Collective; the weights are as before afterwards.

        scale: that of f, for the largest step and for the least error by rounding.
        """
        weights = self.counted.views(self.pieces, lambda parameter: parameter.detach())
        before = [weight.clone() for weight in weights]
        along = self.counted.dot(self.pieces, self.u, self.u) ** 0.5
        size = self.counted.dot(self.pieces, before, before) ** 0.5
        slope = abs(self.counted.dot(self.pieces, self.gradient, self.u)) / along
        step = min(FIRST * (size or 1.0), CHANGE * scale / slope if slope else math.inf)
        found, apart = list[Slope](), list[float]()
        for number in range(STEPS):
            measured, gradient = self._difference(f, step, along, weights, before)
            apart.append(measured - gradient)
            if number > 1:
                first, second, third = apart[-3:]
                better = third + (third - second) / (FACTOR**2 - 1)
                noise = NOISE * scale / step
                error = max(abs(first - second), abs(second - third), noise)
                found.append(Slope(gradient, gradient + better, error))
                if ERRORS * error <= SHARE * found[-1].size / 2:
                    break
            step /= FACTOR
        return min(found, key=lambda slope: slope.error / slope.size if slope.size else 0.0)

    def _difference(
        self,
        f: Callable[[], float],
        step: float,
        along: float,
        weights: Sequence[Tensor],
        before: Sequence[Tensor],
    ) -> tuple[float, float]:
        """Return D and E of one step. along: |u|."""
        values, moved = [], list[list[Tensor]]()
        for sign in (1, -1):
            for weight, old, u in zip(weights, before, self.u, strict=True):
                weight.copy_(old + sign * step / along * u)
            moved.append([weight.clone() for weight in weights])
            values.append(f())
        for weight, old in zip(weights, before, strict=True):
            weight.copy_(old)
        change = [up - down for up, down in zip(*moved, strict=True)]
        by_gradient = self.counted.dot(self.pieces, self.gradient, change)
        return (values[0] - values[1]) / (2 * step), by_gradient / (2 * step)
