"""tools/study/second_round.py: tables and figure of a grid that is small enough to work out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tools.study import collect, second_round
from tools.study.matrix import RATES
from tools.study.report import BEGIN, END, report


def curve(setting: str, arm: str, seed: int, value: float, scale: float = 1.0) -> list[dict[str, Any]]:
    """Return rows of a run whose exact match is `value` at every evaluation, every second iteration."""
    own = {"setting": setting, "algorithm": arm, "seed": seed}
    numbers = dict.fromkeys(collect.METRICS, 0.5) | {"actor/effective_lr": None, "actor/lr": RATES[setting]}
    numbers |= {"actor/correction_scale": scale, collect.EXACT_MATCH: None}
    return [
        own | {"iteration": i} | numbers | ({collect.EXACT_MATCH: value} if i % 2 == 0 else {})
        for i in range(101)
    ]


def test_the_report_has_cells_areas_and_contrasts_and_calls_a_partial_grid_partial(tmp_path: Path) -> None:
    rows = [
        *curve("rate_6", "ppo", 5, 0.75),
        *curve("rate_6", "ppo", 6, 0.5),
        *curve("rate_12", "ppo", 5, 0.25),
        *curve("rate_12", "ppo", 6, 0.25),
        *curve("rate_6", "s_ppo", 5, 0.75, scale=0.5),
        *curve("rate_6", "s_ppo", 6, 0.75, scale=0.5),
        *curve("rate_12", "s_ppo", 5, 0.75, scale=0.5),
        *curve("rate_12", "s_ppo", 6, 0.375, scale=0.5),
        *curve("rate_24", "s_ppo", 5, 0.125, scale=0.5),
        *curve("rate_6", "momentum_reset", 5, 0.75),
        *curve("rate_12", "momentum_reset", 5, 0.5),
        *curve("rate_6", "kl_low", 5, 1.0),
        *curve("rate_12", "kl_low", 5, 1.0),
    ]
    folder, document = tmp_path / "study", tmp_path / "study.md"
    collect.merge(folder, [], rows, [])
    document.write_text(f"{BEGIN}{END}")
    report(folder, document, second_round.sections)
    lines = document.read_text().splitlines()
    assert "Finished runs: 9 of the first stage, 2 of the second family, 2 of `kl_low`." in lines
    assert "| arm | 0.00015 | 0.0003 | 0.0006 | 0.0012 | 0.0024 | rates at 90% of 0.75 |" in lines
    # 0.75 and 0.5: 0.625 +- 12.706 * 0.125
    assert "| `ppo` |  |  | 0.62 ± 1.59 (2) | 0.25 ± 0.00 (2) |  |  |" in lines
    assert "| `s_ppo` |  |  | 0.75 ± 0.00 (2) | 0.56 ± 2.38 (2) | 0.12 (1) | 0.0006 |" in lines
    # over the two rates of both arms, relative to 0.75: ppo (0.75 + 0.25) / 2 / 0.75 = 0.67 and 0.5; s_ppo 1
    # and 0.75
    assert "| `ppo` | 2 | 0.583 |  |" in lines, "an interval needs all five seeds"
    assert "| `ppo` | 1 | 0.667 |  |" in lines, "beside the second family: seed 5, which all arms have"
    assert "| `s_ppo` | 1 | 1.000 |  |" in lines
    # (0.75 + 0.5) / 2 / 0.75 = 0.833, less 0.667; 0.333 and 0.25: 0.292 +- 12.706 * 0.0417
    assert "| `momentum_reset` - `ppo` | 2 | 1 | +0.167 | not complete | not complete |" in lines
    # 1 / 0.75, less 1: the best cell is one of the first stage
    assert "| `s_ppo` - `kl_low` | 2 | 1 | -0.333 | not complete | not complete |" in lines
    assert "| `s_ppo` - `ppo` | 2 | 2 | +0.292 ± 0.529 | not complete | not complete |" in lines
    assert (folder / second_round.PICTURE).stat().st_size > 0
    assert second_round.line(rows, "s_ppo", "effective") == ([6e-4, 1.2e-3, 2.4e-3], [3e-4, 6e-4, 1.2e-3])


def test_equivalence_has_a_p_value_when_all_its_seeds_are_run_and_they_count_nowhere_else(
    tmp_path: Path,
) -> None:
    """Six differences of 0 and six of 0.0625: mean 0.03125, error 0.0094, the margin 1.99 errors away."""
    rows = []
    for seed in range(5, 17):
        rows += curve("rate_6", "s_ppo", seed, 0.5625 if seed % 2 else 0.5)
        rows += curve("rate_6", "open_loop", seed, 0.5)
    collect.merge(tmp_path, [], [row for row in rows if row["seed"] != 16], [])
    line = "| `s_ppo` - `open_loop` | 0.0006 | {} | {} | {} |"
    lines = second_round.sections(tmp_path, tmp_path)
    assert line.format(11, "+0.034 ± 0.022", "not complete") in lines
    collect.merge(tmp_path, [], rows, [])
    lines = second_round.sections(tmp_path, tmp_path)
    # one-sided, 11 degrees of freedom: t tables have 1.796 at 0.05 and 2.201 at 0.025
    assert line.format(12, "+0.031 ± 0.021", "0.036") in lines
    assert any(line.startswith("Finished runs: 10 of the first stage,") for line in lines), (
        "of the seeds 5 to 9"
    )
    assert any(row.startswith("| `open_loop` |  |  | 0.50 ± 0.00 (5) |") for row in lines)
    alone = tmp_path / "alone"
    collect.merge(alone, [], [row for row in rows if row["seed"] == 16], [])
    assert second_round.sections(alone, alone) == [
        "| equivalence | rate | seeds | difference of endpoints, 95 % t interval | p, margin 0.05 |",
        "| --- | --- | --- | --- | --- |",
        line.format(1, "+0.000", "not complete"),
    ]


def test_runs_of_the_second_family_alone_have_cells_and_no_contrast(tmp_path: Path) -> None:
    rows = [*curve("rate_6", "select_turn", 5, 0.5), *curve("rate_12", "select_turn", 5, 0.25)]
    collect.merge(tmp_path, [], rows, [])
    lines = second_round.sections(tmp_path, tmp_path)
    assert "Finished runs: 0 of the first stage, 2 of the second family." in lines
    assert "| `select_turn` |  |  | 0.50 (1) | 0.25 (1) |  | 0.0006 |" in lines


def test_the_printed_form_is_compared_with_the_algorithms_that_have_its_ratio(tmp_path: Path) -> None:
    rows = [*curve("rate_6", "paper", 5, 0.375), *curve("rate_12", "paper", 5, 0.75)]
    rows += [*curve("rate_6", "st_ppo", 5, 0.75), *curve("rate_12", "st_ppo", 5, 0.75)]
    collect.merge(tmp_path, [], rows, [])
    lines = second_round.sections(tmp_path, tmp_path)
    assert "Finished runs: 2 of the first stage, 0 of the second family, 2 of `paper`." in lines
    # (0.375 + 0.75) / 2 / 0.75, less 1
    assert "| `paper` - `st_ppo` | 2 | 1 | -0.250 | not complete | not complete |" in lines
    assert "| `paper` | 1 | 0.750 |  |" in lines


def test_without_runs_the_report_says_so(tmp_path: Path) -> None:
    assert second_round.sections(tmp_path, tmp_path) == ["No run has finished yet."]


def test_an_arm_with_fewer_seeds_than_others_has_their_number_in_its_label() -> None:
    grid = {
        "ppo": {6e-4: {5: 0.5, 6: 0.5}},
        "ess": {6e-4: {5: 0.5}},
        "kl": {6e-4: {5: 0.5}, 3e-4: {5: 0, 6: 0}},
    }
    assert [second_round.named(arm, grid) for arm in grid] == ["ppo", "ess (1 seed)", "kl (1 to 2 seeds)"]
