"""tools/study/lag_report.py: tables and figure of a grid that is small enough to work out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tools.study import again_report, cells, collect, lag_report, second_round
from tools.study.lag_settings import LAGGED, REPEATED, SUMMED

Row = dict[str, Any]


def curve(
    setting: str, arm: str, seed: int, value: float, age: int | None = None, rate: float = 3e-4
) -> list[Row]:
    """Return rows of a run whose exact match is `value` at every evaluation, every second iteration."""
    lag = SUMMED[setting][1] if setting in SUMMED else (LAGGED | REPEATED)[setting][0]
    own = {"setting": setting, "algorithm": arm, "seed": seed}
    numbers = dict.fromkeys(collect.METRICS, 0.5) | {collect.EXACT_MATCH: None, "actor/effective_lr": rate}
    found = []
    for i in range(101):
        old = float(min(i - 1, lag) if age is None else age)
        aged = {"rollout/staleness": old, "rollout/staleness_max": old} if i else {}
        found.append(
            own | {"iteration": i} | numbers | aged | ({collect.EXACT_MATCH: value} if i % 2 == 0 else {})
        )
    return found


def test_a_partial_grid_has_a_table_per_way_to_see_the_lag_and_a_figure(tmp_path: Path) -> None:
    rows = [
        *curve("lag_0", "ppo", 5, 0.75),
        *curve("lag_0", "ppo", 6, 0.5),
        *curve("lag_8", "ppo", 5, 0.25),
        *curve("lag_8_behaviour", "s_ppo", 5, 0.625),
        *curve("lag_4_mask", "st_ppo", 5, 0.5),
    ]
    collect.merge(tmp_path, [], rows, [])
    lines = second_round.sections(tmp_path, Path("study"))
    assert "5 runs are finished, with the declared ages." in lines
    assert "| old policy computed anew | lag 0 | lag 1 | lag 2 | lag 4 | lag 8 |" in lines
    assert "| `ppo` | 0.62 ± 1.59 (2) |  |  |  | 0.25 (1) |" in lines, "0.75 and 0.5: 0.625 +- 12.706 * 0.125"
    assert "| old_policy: behaviour | lag 0 | lag 1 | lag 2 | lag 4 | lag 8 |" in lines
    assert "| `s_ppo` |  |  |  |  | 0.62 (1) |" in lines
    assert "| `st_ppo` |  |  |  | 0.50 (1) |  |" in lines
    assert not any("truncate" in line for line in lines), "which has no run"
    assert "No declared contrast has runs of both arms at both lags yet." in lines
    assert (tmp_path / lag_report.PICTURE).stat().st_size > 0


def test_runs_with_other_ages_are_left_out_and_named(tmp_path: Path) -> None:
    """In iteration 3 of lag 4, trajectories are 2 versions old."""
    rows = [*curve("lag_4", "ppo", 5, 0.5), *curve("lag_4", "s_ppo", 6, 0.5, age=4)]
    rows += curve("sums_3_lag_4", "ppo", 5, 0.5, age=0)
    assert lag_report.other_ages(rows) == ["lag_4-s_ppo-6", "sums_3_lag_4-ppo-5"]
    lines, tables = lag_report.sections(rows, tmp_path, tmp_path)
    assert "1 runs are finished, with the declared ages." in lines
    assert lines[-1].endswith("ages than declared: lag_4-s_ppo-6, sums_3_lag_4-ppo-5.")
    assert not any("s_ppo" in line for line in tables)


def test_contrasts_are_over_the_mean_of_lags_4_and_8_and_have_p_values_with_five_seeds() -> None:
    def of(four: float, eight: float, seeds: range) -> dict[int, dict[int, float]]:
        return {4: {s: four + (s - 5) / 10 for s in seeds}, 8: dict.fromkeys(seeds, eight)}

    seeds = range(5, 10)
    five = {"s_ppo": of(0.1, 0.75, seeds), "ppo": {lag: dict.fromkeys(seeds, 0.25) for lag in (4, 8)}}
    # (0.1 + s / 10 + 0.75) / 2 - 0.25 for s of 0 to 4
    apart = cells.differences(five, "s_ppo", "ppo", (4, 8))
    assert apart == pytest.approx({5: 0.175, 6: 0.225, 7: 0.275, 8: 0.325, 9: 0.375})
    two = {
        arm: {lag: {s: cell[s] for s in (5, 6)} for lag, cell in lags.items()} for arm, lags in five.items()
    }
    five["s_ppo"][0], five["ppo"][0] = {5: 0.75, 6: 0.75}, {5: 0.5, 6: 0.5}
    # since lag 0 the differences of seeds 5 and 6 are 0.175 and 0.225 less 0.25: -0.05 +- 12.706 * 0.025
    assert lag_report.changes(two, five, "s_ppo", "ppo") == pytest.approx({5: -0.075, 6: -0.025})
    lines = lag_report.contrast_table({"": five, "_behaviour": two})
    # 0.275 +- 2.776 * 0.0791 / sqrt(5); t = 0.275 / 0.03536 = 7.778 and 4 degrees of freedom: p = 0.00148,
    # and Holm's correction is over the 2 x 3 declared tests
    first, second = (line for line in lines if "`s_ppo` - `ppo`" in line)
    assert "| old policy computed anew | +0.275 ± 0.098 (5) | 0.001 | 0.009 | -0.050 ± 0.318 (2) |" in first
    assert "| old_policy: behaviour | +0.200 ± 0.318 (2) | not complete | not complete | -0.050 ±" in second


def test_means_of_a_metric_are_over_runs_and_iterations() -> None:
    rows = [*curve("lag_0", "ppo", 5, 0.5, rate=1e-4), *curve("lag_0", "ppo", 6, 0.5, rate=3e-4)]
    rows += curve("lag_8", "ppo", 5, 0.5, rate=0.0)
    lags, means = lag_report.means_of(rows, "ppo", "effective")
    assert (lags, means) == ([0], [pytest.approx(2e-4)]), "0 is not on a logarithmic axis"


def test_runs_made_again_are_compared_with_each_other_and_not_with_the_first(tmp_path: Path) -> None:
    rows = [*curve("lag_8", "ppo", 5, 0.125), *curve("again_4", "ppo", 5, 0.5, age=4)]
    for seed in range(5, 10):
        rows += curve("again_8", "ppo", seed, 0.25, rate=1e-4)
        rows += curve("again_8_truncate", "ppo", seed, 0.5 + (seed - 5) / 10)
    rows += [*curve("again_8", "kl_low", 5, 0.75), *curve("again_8_behaviour", "s_ppo", 6, 0.5)]
    lines, tables = lag_report.sections(rows, tmp_path, tmp_path)
    assert lines[-13:] == [
        "12 runs are finished, with the declared ages; 75 were declared.",
        "",
        "`truncate` and no `mismatch` (Holm's correction over 4 contrasts):",
        "",
        "| contrast at lag 8 | difference, 95 % t interval (seeds) | p | Holm |",
        "| --- | --- | --- | --- |",
        # 0.25 to 0.65: 0.45 +- 2.776 * 0.1581 / sqrt(5); t = 0.45 / 0.0707 = 6.36: p = 0.0031, and of 4 tests
        "| `ppo`: `truncate` - off | +0.450 ± 0.196 (5) | 0.003 | 0.013 |",
        "",
        "`kl_low`, the default, and the others (Holm's correction over 4 contrasts):",
        "",
        "| contrast at lag 8 | difference, 95 % t interval (seeds) | p | Holm |",
        "| --- | --- | --- | --- |",
        "| `kl_low` - `ppo`: anew | +0.500 (1) | not complete | not complete |",
    ]
    assert any(line.endswith("other ages than declared: again_4-ppo-5.") for line in lines)
    assert tables[-11:] == [
        "| lag again | lag 8, anew | lag 8, `behaviour` | lag 8, `truncate` |",
        "| --- | --- | --- | --- |",
        "| `ppo` | 0.25 ± 0.00 (5) |  | 0.70 ± 0.20 (5) |",
        "| `s_ppo` |  | 0.50 (1) |  |",
        "| `kl_low` | 0.75 (1) |  |  |",
        "",
        "| mean effective rate | lag 8, anew | lag 8, `behaviour` | lag 8, `truncate` |",
        "| --- | --- | --- | --- |",
        "| `ppo` | 1.0e-04 |  | 3.0e-04 |",
        "| `s_ppo` |  | 3.0e-04 |  |",
        "| `kl_low` | 3.0e-04 |  |  |",
    ]


def test_a_comparison_that_was_not_declared_as_a_test_has_no_p_value() -> None:
    of = {
        arm: {(8, "_behaviour"): {seed: value + seed / 10 for seed in range(5, 10)}}
        for arm, value in (("s_ppo", 0.5), ("ppo", 0.25))
    }
    assert again_report.contrast_table(of, again_report.DESCRIBED, tested=False) == [
        "| contrast at lag 8 | difference, 95 % t interval (seeds) |",
        "| --- | --- |",
        "| `s_ppo` - `ppo`: `behaviour` | +0.250 ± 0.000 (5) |",
    ]
