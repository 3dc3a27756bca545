from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron_stppo.observe.console import RowLines, line, say, timed
from megatron_stppo.observe.metrics import Metrics

ROW = {
    "seconds": 1.6,
    "reward/mean": 0.2656,
    "rollout/exact_match": 0.25,
    "outcome/ok": 16,
    "outcome/error": 1,
    "outcome/timeout": 2,
    "rollout/truncated": 0.125,
    "rollout/tokens_per_second": 2707.4,
}


def test_an_iteration_prints_one_line_with_reward_exact_match_failures_and_speed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = Metrics(tmp_path, 0, reporters=[RowLines("st_ppo", 6)])
    metrics.log(4, {name: value for name, value in ROW.items() if name != "seconds"})
    metrics.close()
    seconds = json.loads((tmp_path / "metrics.jsonl").read_text())["seconds"]
    assert capsys.readouterr().err == (
        "st_ppo 4/6: reward 0.266, exact match 0.250, failed 3, truncated 12%, 2,707 tokens/s, "
        f"{seconds:.1f} s\n"
    )


def test_a_row_shows_the_columns_that_it_has() -> None:
    assert line({"evaluate/exact_match": 0.5, "seconds": 2.0}) == "held-out exact match 0.500, 2.0 s"


def test_a_mean_is_shown_with_its_standard_error() -> None:
    errors = {"reward/standard_error": 0.0512, "evaluate/exact_match": 0.5, "evaluate/standard_error": None}
    shown = line(ROW | errors)
    assert shown.startswith("reward 0.266 ± 0.051, exact match 0.250,")
    assert "held-out exact match 0.500, " in shown


def test_a_reward_that_is_the_exact_match_is_shown_once() -> None:
    row = ROW | {"rollout/exact_match": 0.266, "reward/mean": 0.266}
    assert line(row).startswith("reward 0.266, failed 3")
    same = {"evaluate/reward": 0.5, "evaluate/exact_match": 0.5, "evaluate/standard_error": 0.1}
    assert line(same) == "held-out exact match 0.500 ± 0.1"


def test_an_explained_variance_without_a_meaning_is_not_shown_as_a_number() -> None:
    of = "critic/explained_variance"
    assert line({of: -354.84}) == "critic explains < -10"
    assert (line({of: -10.0}), line({of: None})) == ("critic explains -10.00", "critic explains nan")


def test_columns_are_named_so_that_they_are_understood_without_a_manual() -> None:
    of = {"actor/removed_share": 0.75, "actor/effective_share": 0.5}
    assert line(of) == "clipped gradient 75%, rate 50%"
    assert line({"evaluate/reward": 0.5, "evaluate/exact_match": 0.0}) == (
        "held-out reward 0.500, held-out exact match 0.000"
    )


def test_an_asynchronous_row_also_shows_staleness_and_who_waits() -> None:
    shares = {"serving/trainer_idle_share": 0.642, "serving/idle_share": 0.007}
    row = ROW | {"rollout/staleness": 0.5, "serving/replicas": 2} | shares
    shown = "2,707 tokens/s, staleness 0.50, trainer idle 64%, replicas idle 1%, 1.6 s"
    assert line(row).endswith(shown)
    assert "stale" not in line(ROW | {"rollout/staleness": 0})


def test_a_number_that_is_not_finite_is_shown_as_nan() -> None:
    assert line(ROW | {"reward/mean": None}).startswith("reward nan, exact match 0.250, failed 3")


def test_a_part_of_start_up_is_printed_with_its_seconds_by_the_first_rank_only(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for first in (True, False):
        with timed("engine", first):
            pass
        say("resumed from step_4 of 6", first)
    engine, resumed = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"megatron-stppo: engine 0\.\d s", engine)
    assert resumed == "megatron-stppo: resumed from step_4 of 6"


def test_a_part_of_start_up_that_fails_is_not_printed_as_done(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="no such model"), timed("models"):
        raise ValueError("no such model")
    assert capsys.readouterr().err == ""
