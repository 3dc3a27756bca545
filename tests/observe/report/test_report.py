"""The data of the page: damaged lines are counted, large files are shortened, and no text is markup."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import megatron_stppo
from megatron_stppo.config import ConfigError
from megatron_stppo.observe.report import episodes, lines, numbers, page
from tests import documented
from tests.observe.report import hostile

ROOT = Path(megatron_stppo.__file__).parent


def data_of(path: Path) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text())
    assert found is not None
    return dict(json.loads(found[1]))


def test_damaged_lines_are_counted_and_the_rest_is_shown(tmp_path: Path) -> None:
    run = hostile.write(tmp_path / "run")
    hostile.damage(run)
    notes = page.draw([run], tmp_path / "page.html")
    assert notes == [
        "run: metrics.jsonl: 8 damaged lines left out",
        "run: trajectories/iteration-00001.turns.jsonl: 1 damaged line left out",
        "run: trajectories/iteration-00001.jsonl: 5 damaged lines left out",
        "run: config.yaml is damaged and left out",
        "run: Episodes shown: all 4.",
    ]
    (shown,) = data_of(tmp_path / "page.html")["runs"]
    assert shown["columns"]["reward/mean"] == [[1, 2, 3, 4, 5], [0.25, 0.5, 0.75, 1.0, None]]
    assert shown["overview"]["reward"] == [0.25, None, 1.0]
    assert not {"x", "y", "z"} & set(shown["columns"])
    assert [turn.get("ratio") for one in shown["episodes"] for turn in one["turns"]] == [
        1,
        1.5,
        0.9,
        None,
        None,
    ]


def test_numbers_that_the_update_did_not_record_are_absent_from_turns(tmp_path: Path) -> None:
    page.draw([hostile.write(tmp_path / "run")], tmp_path / "page.html")
    (shown,) = data_of(tmp_path / "page.html")["runs"]
    (turn,) = shown["episodes"][2]["turns"]
    assert (turn["action"][:3], turn["version"], turn["tokens"]) == ("xxx", "1", 5)
    for told in (tmp_path / "run" / "trajectories").glob("*.turns.jsonl"):
        told.unlink()
    notes = page.draw([tmp_path / "run"], tmp_path / "page.html")
    assert "run: the updates recorded no ratios and no advantages of these turns" in notes


def test_the_overview_has_the_failed_episodes_of_all_iterations_by_cause(tmp_path: Path) -> None:
    rows = [(1, 2, 0, 1), (2, 0, 3, 0), (3, 1, 1, 0)]
    names = ("iteration", "outcome/error", "outcome/timeout", "rollout/overlong_prompts")
    text = "".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows)
    (tmp_path / "metrics.jsonl").write_text(text)
    shown = numbers.read(tmp_path, [])["overview"]
    assert (shown["episodes that failed: error"], shown["episodes that failed: timeout"]) == (3, 4)
    assert shown["prompts that are too long"] == 1


def test_every_panel_draws_metrics_of_docs_metrics_md() -> None:
    names = re.findall(r'"([a-z]+/\w+)"', (ROOT / "observe/report" / "panels.js").read_text())
    assert len(names) > 20 and not set(names) - set(documented.metrics())


def test_parts_of_a_whole_are_stacked_by_phase_and_by_staleness(tmp_path: Path) -> None:
    rows = [
        {"iteration": 1, "staleness/tokens_0": 1.0, "seconds/score": 1.0, "seconds/update": 3.0},
        {"iteration": 2, "staleness/tokens_0": 0.25, "staleness/tokens_1": 0.75, "seconds/update": 4.0},
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text(hostile.lines(*rows))
    colocated = numbers.read(tmp_path, [])
    assert colocated["phases"] == {
        "names": ["update", "score"],  # the longest first
        "iterations": [1, 2],
        "amounts": [[3.0, 1.0], [4.0, 0.0]],
    }
    assert colocated["staleness"]["iterations"] == [], "only asynchronous runs have a panel"
    path.write_text(hostile.lines(*(row | {"serving/replicas": 2} for row in rows)))
    assert numbers.read(tmp_path, [])["staleness"] == {
        "names": ["0", "1"],
        "iterations": [1, 2],
        "amounts": [[1.0, 0.0], [0.25, 0.75]],
    }


def test_a_run_that_has_just_begun_makes_a_page(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run: {name: new}")
    assert page.draw([tmp_path], tmp_path / "page.html") == [
        f"{tmp_path.name}: metrics.jsonl cannot be read: No such file or directory",
        f"{tmp_path.name}: There are no trajectories.",
    ]


def test_text_from_files_is_never_markup(tmp_path: Path) -> None:
    text = page.in_html({hostile.MARKUP: hostile.CODES})
    assert text.isascii() and text.isprintable() and not set(text) & set("<>&")
    assert json.loads(text) == {hostile.MARKUP: hostile.CODES}
    page.draw([hostile.write(tmp_path / "run")], tmp_path / "page.html")
    whole = (tmp_path / "page.html").read_text()
    assert whole.count("<script") == whole.count("</script") == 2


def test_pages_are_bounded_and_list_what_they_omit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = hostile.write(tmp_path / "run")
    assert page.draw([run], tmp_path / "a.html", 3)[-1] == (
        "run: Episodes shown: 3, the first ones of 2 of 2 iterations."
    )
    assert page.draw([run], tmp_path / "a.html", 1)[-1] == (
        "run: Episodes shown: 1, the first ones of 1 of 2 iterations."
    )
    page.draw([run], tmp_path / "b.html")
    (shown,) = data_of(tmp_path / "b.html")["runs"]
    text = shown["episodes"][2]["turns"][0]["action"]
    assert text.endswith(f"[{2**20 - episodes.MAX_TEXT} more characters are in the file]")
    assert (tmp_path / "b.html").stat().st_size < 100_000
    monkeypatch.setattr(episodes, "MAX_BYTES", 4000)
    assert "Episodes shown: 3," in page.draw([run], tmp_path / "c.html")[-1]


def test_a_line_without_an_end_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE", 16)
    (tmp_path / "x").write_text('{"a": 1}\n{"a": "' + "y" * 50 + '"}\n{"a": 2}\n')
    found = lines.Lines(tmp_path / "x")
    assert list(found) == [(0, {"a": 1}), (2, {"a": 2})]
    assert found.damaged == 1


def test_thinning_keeps_spikes_and_the_end() -> None:
    assert numbers.thin([1, 2, 3, 4, 5, 6, 7], [0, 5, 1, 1, 9, 0, 2], 4) == ([1, 2, 5, 6, 7], [0, 5, 9, 0, 2])
    values = [0.0] * 50_000
    values[31_234] = 7.0
    kept, heights = numbers.thin(list(range(50_000)), values)
    assert len(kept) <= numbers.POINTS + 1 and kept[-1] == 49_999
    assert (31_234, 7.0) in zip(kept, heights, strict=True)
    gap = numbers.thin([1, 2, 3, 4, 5, 6], [0.0, None, None, 2.0, 1.0, 3.0], 4)
    assert gap == ([1, 2, 5, 6], [0.0, None, 1.0, 3.0])


def test_many_iterations_are_summarised_in_one_sentence() -> None:
    every_second = {iteration: (iteration % 2, True) for iteration in range(1, 1000)}
    assert episodes.left_out(every_second) == (
        "Episodes shown: 500, the first ones of 500 of 999 iterations."
    )


def test_runs_of_one_name_get_distinct_labels(tmp_path: Path) -> None:
    folders = [tmp_path / "a" / "run", tmp_path / "b" / "run"]
    assert page.names(folders) == [str(folder) for folder in folders]
    assert page.names([tmp_path / "a", tmp_path / "b"]) == ["a", "b"]


def test_a_page_that_cannot_be_drawn_does_not_fail_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = hostile.write(tmp_path / "run")
    (run / page.FILE).mkdir()
    with caplog.at_level(logging.WARNING):
        page.draw_at_the_end(run)
    assert "report.html: not drawn: ConfigError: --output=" in caplog.text


def test_the_command_writes_into_the_run_folder_and_refuses_other_folders(tmp_path: Path) -> None:
    def report(*arguments: Path | str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "megatron_stppo", "report", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    run = hostile.write(tmp_path / "run")
    done = report(run)
    assert (done.returncode, done.stdout.strip()) == (0, str(run / "report.html"))
    assert (run / "report.html").exists()
    refused = report(tmp_path, "--output", tmp_path / "page.html")
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"megatron-stppo: RUN_DIR={tmp_path}: holds none of metrics.jsonl, ")
    assert not (tmp_path / "page.html").exists()
    with pytest.raises(ConfigError, match="name a file that can be written"):
        page.draw([run], tmp_path / "missing" / "page.html")


def test_the_files_of_the_page_are_installed_with_the_package() -> None:
    settings = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())
    packaged = settings["tool"]["setuptools"]["package-data"]["megatron_stppo.observe.report"]
    found = {path.name for pattern in packaged for path in (ROOT / "observe/report").glob(pattern)}
    assert found == {"page.html", "page.css", *page.SCRIPTS}


def test_a_turn_shows_the_policy_versions_of_its_tokens(tmp_path: Path) -> None:
    folder = hostile.write(tmp_path / "run")
    path = folder / "trajectories" / "iteration-00001.jsonl"
    path.write_text(path.read_text().replace('"versions": [[1, 1]]', '"versions": [[3, 12], [4, 5]]'))
    page.draw([folder], tmp_path / "page.html")
    (shown,) = data_of(tmp_path / "page.html")["runs"]
    assert {turn["version"] for turn in shown["episodes"][0]["turns"]} == {"3 (12 tokens), 4 (5)"}
