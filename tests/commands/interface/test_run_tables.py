"""A run's folder as tables."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megatron_stppo import read_run
from megatron_stppo.config import ConfigError
from megatron_stppo.observe import run_tables

EPISODE = {
    "iteration": 2,
    "data_source": "digits",
    "split": "train",
    "index": 7,
    "group": 0,
    "branch": 0,
    "outcome": "ok",
    "reward": 1.0,
    "tool_calls": 1,
    "valid_actions": 2,
    "detail": "7",
    "targets": ["7"],
    "prompt": "guess",
    "metrics": {"guesses": 2},
    "turns": [
        {"action": "5", "observation": " higher ", "token_ids": [1, 2], "versions": [[1, 2]]},
        {"action": "7", "observation": "", "token_ids": [3], "versions": [[1, 1]]},
    ],
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "metrics.jsonl").write_text(
        '{"iteration": 1, "reward/mean": 0.25, "kl": null}\n'
        '{"iteration": 2, "reward/mean": 0.5, "kl": 0.125}\n'
        '{"iteration": 3, "rew'  # being written
    )
    (tmp_path / "trajectories").mkdir()
    (tmp_path / "trajectories" / "iteration-00002.jsonl").write_text(json.dumps(EPISODE) + "\n")
    return tmp_path


def test_metrics_have_a_row_per_complete_iteration(run: Path) -> None:
    table = read_run(run).metrics
    assert table.index.tolist() == [1, 2] and table.index.name == "iteration"
    assert table["reward/mean"].tolist() == [0.25, 0.5]
    assert math.isnan(table["kl"][1]) and table["kl"][2] == 0.125


def test_episodes_have_the_text_and_the_environments_metrics(run: Path) -> None:
    (row,) = read_run(run).episodes.to_dict("records")
    assert (row["turns"], row["tokens"], row["text"]) == (2, 3, "5 higher 7")
    assert (row["tool_calls"], row["environment/guesses"], row["targets"]) == (1, 2, ["7"])


def test_the_histories_of_an_agents_episode_are_rows_and_one_of_them_counts_the_episode(run: Path) -> None:
    path = run / "trajectories" / "iteration-00002.jsonl"
    lines = (EPISODE, EPISODE | {"branch": 0, "reward": 0.0}, EPISODE | {"branch": 1, "reward": 0.0})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    table = read_run(run).episodes
    assert table.branch.tolist() == [0, 0, 1], "0 also in files of versions without branches"
    assert table[table.branch == 0].reward.mean() == 0.5


def test_a_folder_without_episodes_gives_an_empty_table_with_the_columns(run: Path) -> None:
    (run / "trajectories" / "iteration-00002.jsonl").unlink()
    table = read_run(run).episodes
    assert len(table) == 0 and {"reward", "outcome", "text"} <= set(table.columns)


def test_wrong_folders_and_damaged_files_give_one_line(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none: holds no metrics.jsonl and no trajectories/; give a run's"):
        read_run(tmp_path / "none")
    path = run / "trajectories" / "iteration-00002.jsonl"
    for line in ("{", "[]", '{"turns": 3}', '{"turns": [{"action": "a"}]}'):
        path.write_text(f"{json.dumps(EPISODE)}\n{line}\n")
        with pytest.raises(ConfigError, match=r"iteration-00002.jsonl line 2: is not an episode"):
            read_run(run).episodes  # noqa: B018
    (run / "metrics.jsonl").write_text("{\n")
    with pytest.raises(ConfigError, match=r"metrics.jsonl line 1: is not a row of metrics"):
        read_run(run).metrics  # noqa: B018


def test_without_pandas_one_line_names_the_package(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_tables, "pandas", None)
    with pytest.raises(ConfigError, match=r"^tables need pandas; pip install pandas$"):
        read_run(run).metrics  # noqa: B018
