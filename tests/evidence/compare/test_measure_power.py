"""The script of the study that measures how the ratios of turns shrink with their length."""

from __future__ import annotations

import runpy

import numpy as np
import pytest

from tests.documented import DOCS


@pytest.mark.parametrize("planted", [0.5, 1.0])
def test_it_finds_the_power_of_planted_ratios(planted: float) -> None:
    measure = runpy.run_path(str(DOCS / "study" / "measure_power.py"))
    draw = np.random.default_rng(0)
    tokens = draw.integers(5, 300, size=2000)
    rows = np.stack([np.arange(2000), tokens, draw.normal(0, 0.1 * tokens**-planted)], axis=1)
    low, high = measure["interval"](rows, samples=100)
    assert low < measure["power"](rows) < high < low + 0.15 and low < planted < high
