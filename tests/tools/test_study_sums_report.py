"""tools/study/sums_report.py: tables of a grid that is small enough to work out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tools.test_study_lag_report import curve
from tools.study import lag_report, sums_report

Row = dict[str, Any]


def test_the_third_task_has_a_table_over_its_rates_and_lags() -> None:
    rows = [*curve("sums_3_lag_0", "ppo", 5, 0.75), *curve("sums_6_lag_4", "ppo", 5, 0.5)]
    for row in rows:
        row |= {"rollout/response_tokens": 60.0, "rollout/turns": 1.5 if row["iteration"] else 2.0}
    lines, tables = lag_report.sections(rows, Path(), Path())
    turns = "Tokens per turn: 40 on average, 30 to 40 over the iterations."
    assert f"2 of 100 runs are finished. {turns}" in lines
    assert "No declared contrast has runs of both arms at both lags yet." in lines
    assert "| arm | 0.0003, lag 0 | 0.0003, lag 4 | 0.0006, lag 0 | 0.0006, lag 4 |" in tables
    assert "| `ppo` | 0.75 (1) |  |  | 0.50 (1) |" in tables


def test_its_contrasts_are_over_both_lags_of_a_rate_and_are_shown_without_the_seed_that_was_known() -> None:
    def of(first: float, second: float, rate: float, seeds: range) -> dict[Any, dict[int, float]]:
        return {(rate, 0): {s: first + (s - 5) / 10 for s in seeds}, (rate, 4): dict.fromkeys(seeds, second)}

    five, two = range(5, 10), range(5, 7)
    found = {
        "s_ppo": of(0.1, 0.75, 6e-4, five) | of(0.5, 0.5, 3e-4, two),
        "ppo": {(6e-4, lag): dict.fromkeys(five, 0.25) for lag in (0, 4)} | of(0.5, 0.25, 3e-4, two),
        "st_ppo": {(6e-4, 0): dict.fromkeys(five, 0.5)},
    }
    shown = sums_report.contrast_table(found, sums_report.CONTRASTS)
    higher, *others = [line for line in shown if "`s_ppo` - `ppo`" in line][::-1]
    # (0.1 + s / 10 + 0.75) / 2 - 0.25 for s of 0 to 4: the mean is 0.275, with t = 7.778 and p = 0.00148,
    # which is the smallest of 8 declared tests. Without s = 2, whose difference is the mean, the standard
    # deviation is sqrt(0.025 / 3) = 0.0913 and the half width 3.182 * 0.0913 / 2 = 0.145.
    assert higher == (
        "| `s_ppo` - `ppo` | 0.0006 | +0.275 ± 0.098 (5) | 0.001 | 0.012 | +0.275 ± 0.145 (4) |"
    )
    assert others == [
        "| `s_ppo` - `ppo` | 0.0003 | +0.125 ± 0.000 (2) | not complete | not complete | +0.125 ± 0.000 (2) |"
    ], "(0.5 + 0.5) / 2 - (0.5 + 0.25) / 2 on both seeds"
    assert not any("st_ppo" in line for line in shown), "it has one lag of two"


def test_the_contrasts_that_were_declared_later_have_a_correction_of_their_own() -> None:
    rows: list[Row] = []
    for seed in range(5, 10):
        for lag in (0, 4):
            rows += curve(f"sums_6_lag_{lag}", "s_ppo", seed, 0.1 + (seed - 5) / 10 if lag == 0 else 0.75)
            rows += curve(f"sums_6_lag_{lag}", "kl", seed, 0.25)
            rows += curve(f"sums_3_lag_{lag}", "s_ppo", seed, 0.1 + (seed - 5) / 10 if lag == 0 else 0.75)
            rows += curve(f"sums_3_lag_{lag}", "kl_low", seed, 0.25)
    for row in rows:
        row |= {"rollout/response_tokens": 60.0, "rollout/turns": 2.0 if row["algorithm"] == "s_ppo" else 1.0}
    lines, tables = sums_report.sections(rows)
    turns = "Tokens per turn: 30 on average, 30 to 30 over the iterations."
    assert (
        f"20 of 100 runs are finished. Runs that were declared later: 10 of `kl`, 10 of `kl_low`. {turns}"
        in lines
    )
    after = lines[lines.index("Declared when the results of `s_ppo` were known:") :]
    # The differences of the test above, the smallest of 4 tests and of 2: p = 4 * 0.00148 and 2 * 0.00148.
    row = "| `s_ppo` - `{}` | {} | +0.275 ± 0.098 (5) | 0.001 | {} | +0.275 ± 0.145 (4) |"
    assert after[4] == row.format("kl", "0.0006", "0.006") and after[4] not in lines[: -len(after)]
    assert after[-1] == row.format("kl_low", "0.0003", "0.003")
    assert tables[-2] == "| `kl` |  |  | 0.25 ± 0.00 (5) | 0.25 ± 0.00 (5) |"


def test_narrower_bounds_are_compared_at_lag_0_alone() -> None:
    rows: list[Row] = []
    for seed in range(5, 10):
        rows += curve("sums_3_lag_0", "st_ppo", seed, 0.25)
        rows += curve("sums_3_lag_4", "st_ppo", seed, 0.75)
        rows += curve("sums_3_lag_0", "st_ppo_0.006", seed, 0.1 + (seed - 5) / 10)
    for row in rows:
        row |= {"rollout/response_tokens": 60.0, "rollout/turns": 2.0}
    lines, tables = sums_report.sections(rows)
    after = lines[lines.index("`st_ppo` with narrower bounds of the ratio, named after them:") :]
    head = "| contrast | rate | lag 0: difference, 95 % t interval (seeds) | p | Holm | without seed 7 |"
    # 0.1 + s / 10 - 0.25 for s of 0 to 4: the mean is 0.05 with an error of 0.158 / sqrt(5), t = 0.707 with 4
    # degrees of freedom and p = 0.519; the smallest of 8 declared tests
    assert after[2] == head
    assert after[4].startswith("| `st_ppo_0.006` - `st_ppo` | 0.0003 | +0.050 ± 0.196 (5) | 0.519 | 1.000 |")
    assert len(after) == 5, "s_ppo and the other bound have no runs"
    assert tables[-1] == "| `st_ppo_0.006` | 0.30 ± 0.20 (5) |  |  |  |"


def test_a_run_without_turns_is_said() -> None:
    rows = curve("sums_3_lag_0", "ppo", 5, 0.0)
    for row in rows:
        row |= {"rollout/response_tokens": 0.0, "rollout/turns": 0.0}
    assert sums_report.turn_tokens(rows) == "The runs have no turns."


@pytest.mark.parametrize("part", [0, 1])
def test_there_is_no_part_without_runs(part: int) -> None:
    assert sums_report.sections([])[part] == []
