from __future__ import annotations

from pathlib import Path

import pytest

from megatron_stppo.config import Config
from megatron_stppo.config.file import load
from megatron_stppo.observe.run_files import played_path, recorded, turns_path
from megatron_stppo.validation import attempts
from megatron_stppo.validation.run_folder import config_of
from tests.full_disk import full_disk


def config(root: Path, **update: object) -> Config:
    return Config.model_validate({"model": {"path": "m"}, "run": {"root": root}, "update": update})


def test_every_attempt_keeps_its_configuration_and_the_newest_has_the_plain_name(tmp_path: Path) -> None:
    first, second = config(tmp_path), config(tmp_path, epochs=3)
    attempts.record(first, 0)
    attempts.record(second, 0)
    attempts.record(second, 1)
    kept = {
        path.relative_to(first.run.folder).as_posix(): path.read_text() for path in tmp_path.rglob("*.yaml")
    }
    assert kept == {
        "config.yaml": second.absolute().dump(),
        "configs/attempt-1.yaml": first.absolute().dump(),
        "configs/attempt-2.yaml": second.absolute().dump(),
    }


def test_trajectories_that_an_attempt_repeats_are_set_aside_under_the_attempt_before(tmp_path: Path) -> None:
    run = config(tmp_path).run.folder
    attempts.record(config(tmp_path), 0)
    (run / "trajectories").mkdir()
    for path in (played_path(run, 9), turns_path(run, 9), played_path(run, 10), turns_path(run, 10)):
        path.touch()
    attempts.record(config(tmp_path), 1, 9)
    assert recorded(run) == [9, 10]
    attempts.record(config(tmp_path), 0, 9)
    attempts.record(config(tmp_path), 0, 9)
    assert recorded(run) == [9]
    attempts.record(config(tmp_path), 0)
    assert recorded(run) == []
    folder = run / "trajectories"
    assert sorted(path.relative_to(folder).as_posix() for path in folder.glob("*/*")) == [
        "attempt-1/iteration-00010.jsonl",
        "attempt-1/iteration-00010.turns.jsonl",
        "attempt-3/iteration-00009.jsonl",
        "attempt-3/iteration-00009.turns.jsonl",
    ]


def test_paths_of_a_run_are_those_of_the_folder_in_which_it_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    given = Config.model_validate({"model": {"path": "m"}, "environment": {"retrieval": {"index": "../i"}}})
    attempts.record(given, 0)
    attempts.say_changes(given)
    assert capsys.readouterr().err == ""
    monkeypatch.chdir("/")
    found = load(config_of(tmp_path / "runs" / "run"))
    assert (found.model.path, found.run.folder) == (tmp_path / "m", tmp_path / "runs" / "run")
    assert found.environment.retrieval.index == tmp_path / "../i"
    assert found.data.train is None


def test_a_full_disk_leaves_no_part_of_a_configuration(tmp_path: Path) -> None:
    """The one of the first attempt is read again by `replay`."""
    with full_disk(), pytest.raises(OSError):
        attempts.record(config(tmp_path), 0)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_resumed_run_reports_changed_fields(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    attempts.say_changes(config(tmp_path))  # a folder of checkpoints alone
    attempts.record(config(tmp_path), 0)
    attempts.say_changes(config(tmp_path))
    assert capsys.readouterr().err == ""
    changed = config(tmp_path, epochs=3, actor={"lr": 0.5})
    changed.cold_start.lr, changed.data.demonstrations = 0.5, tmp_path  # which training does not read
    attempts.say_changes(changed)
    assert capsys.readouterr().err.splitlines() == [
        "megatron-stppo: --resume changes update.epochs: 1 -> 3",
        "megatron-stppo: --resume changes update.actor.lr: 1e-06 -> 0.5",
    ]
    (tmp_path / "run" / "config.yaml").write_text("run: [")
    attempts.say_changes(config(tmp_path))
    assert "config.yaml is damaged" in capsys.readouterr().err


def test_added_and_removed_fields_are_changes_too() -> None:
    assert attempts.changes({"megatron": {}, "a": {"b": [1]}}, {"megatron": {"c": 1}, "a": {"b": [2]}}) == [
        "megatron.c: not given -> 1",
        "a.b: [1] -> [2]",
        "megatron: {} -> not given",
    ]
