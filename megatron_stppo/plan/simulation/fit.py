"""Fits of measured times that are robust to disturbed measurements."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

ROUNDS = 50


def fit(columns: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Return the coefficients c >= 0, one per column, with the least sum of |values - columns c|.

    Absolute deviations instead of squares: a few measurements that were disturbed by other work then have no
    influence. All subsets of columns are tried, so there should be at most about four.
    Example: columns (1, 1, 1, 1) and (0, 1, 2, 3) with values (2, 3, 4, 50) give [2, 1].
    """
    target = np.asarray(values, dtype=float)
    best, least = [0.0] * len(columns), float(np.abs(target).sum())
    for count in range(1, len(columns) + 1):
        for chosen in itertools.combinations(range(len(columns)), count):
            matrix = np.stack([np.asarray(columns[k], dtype=float) for k in chosen], axis=1)
            found = _least_deviations(matrix, target)
            error = float(np.abs(target - matrix @ found).sum())
            if (found >= 0).all() and error < least * (1 - 1e-9):
                best, least = [0.0] * len(columns), error
                for k, value in zip(chosen, found, strict=True):
                    best[k] = float(value)
    return best


def _least_deviations(matrix: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the coefficients by least squares with weights that make squares absolute deviations."""
    scale = np.abs(matrix).max(axis=0)
    scale[scale == 0] = 1.0
    weights = np.ones(len(target))
    for _ in range(ROUNDS):
        root = np.sqrt(weights)
        found = np.linalg.lstsq(matrix / scale * root[:, None], target * root, rcond=None)[0]
        deviations = np.abs(target - matrix / scale @ found)
        weights = 1 / np.maximum(deviations, 1e-9 * max(1e-300, float(np.abs(target).max())))
    return found / scale
