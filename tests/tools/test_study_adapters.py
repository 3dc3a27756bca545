"""tools/study/adapter_*.py: settings, and a report of runs that are few enough to work out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_stppo.config_file import load
from tools.study import adapter_report, collect, matrix
from tools.study.adapter_settings import ADAPTED
from tools.study.bases import SEARCH
from tools.study.report import BEGIN, END, report


def curve(setting: str, seed: int, early: float, late: float, seconds: float = 2.0) -> list[dict[str, Any]]:
    """Return the rows of a run with exact match `early` until iteration 10 and `late` after it."""
    own = {"setting": setting, "algorithm": "st_ppo", "seed": seed}
    numbers = dict.fromkeys(collect.METRICS, 0.5) | {"seconds/update": seconds, collect.EXACT_MATCH: None}
    return [
        own
        | {"iteration": i}
        | numbers
        | ({collect.EXACT_MATCH: early if i <= 10 else late} if i % 2 == 0 else {})
        for i in range(21)
    ]


def test_settings_differ_in_rank_and_rates_only() -> None:
    adapted = load(SEARCH.config, matrix.Run("rank_16_12", "st_ppo", 5).overrides())
    assert (adapted.model.lora.rank, adapted.model.lora.alpha) == (16, 32)
    assert (adapted.update.actor.lr, adapted.update.critic.lr) == (1.2e-3, 3.6e-3)
    full = load(SEARCH.config, matrix.Run("rank_0_12", "st_ppo", 5).overrides())
    assert full.model.lora.rank == 0
    assert full == adapted.model_copy(update={"model": full.model})
    assert len(ADAPTED) == 5 + 3 * 6


def test_the_report_compares_every_rank_at_its_best_rate_with_all_weights_at_theirs(tmp_path: Path) -> None:
    rows = [
        *curve("rank_0_1.5", 5, 0.5, 0.75),
        *curve("rank_0_1.5", 6, 0.25, 0.75),
        *curve("rank_0_6", 5, 0.75, 0.25),
        *curve("rank_16_12", 5, 0.25, 0.5, seconds=1.0),
        *curve("rank_16_12", 6, 0.25, 0.75, seconds=1.0),
    ]
    folder, document = tmp_path / "study", tmp_path / "lora.md"
    collect.merge(folder, [], rows, [])
    document.write_text(f"{BEGIN}{END}")
    report(folder, document, adapter_report.sections)
    lines = document.read_text().splitlines()
    assert "5 of 69 runs are finished." in lines
    assert "| trained | 0.00015 | 0.0006 | 0.0012 |" in lines
    assert "| all weights | 0.75 ± 0.00 (2) | 0.25 (1) |  |" in lines
    # 0.5 and 0.75: 0.625 +- 12.706 * 0.125; less 0.75 and 0.75; early 0.25 and 0.25 less 0.5 and 0.25
    assert "| rank 16 |  |  | 0.62 ± 1.59 (2) |" in lines
    late, early = "0.62 ± 1.59 (2)", "0.25 ± 0.00 (2)"
    assert f"| rank 16 | 0.0012 | {late} | {early} | -0.12 ± 1.59 (2) | -0.12 ± 1.59 (2) | 1.00 |" in lines
    assert (folder / adapter_report.PICTURE).stat().st_size > 0


def test_an_evaluation_that_a_run_does_not_reach_counts_as_0() -> None:
    ended = [row for row in curve("rank_0_6", 5, 0.5, 0.5) if row["iteration"] <= 12]
    # one of the five evaluations from 12 to 20
    assert adapter_report.cells(ended, adapter_report.LATE) == {0: {6e-4: {5: 0.1}}}


def test_without_runs_the_report_says_so(tmp_path: Path) -> None:
    assert adapter_report.sections(tmp_path, tmp_path) == ["No run has finished yet."]


def test_a_run_that_ends_before_the_late_window_counts_as_0_there() -> None:
    rows = curve("rank_0_6", 5, 0.75, 0.25)[:11]
    assert adapter_report.cells(rows, adapter_report.LATE) == {0: {6e-4: {5: 0.0}}}
