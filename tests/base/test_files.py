"""Files and folders are replaced in one step."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_stppo.base.errors import ConfigError
from megatron_stppo.base.files import make_scratch, replace_folder, replacing, scratch_of, unused


def test_the_old_file_is_there_until_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    with replacing(path) as scratch:
        scratch.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert [found.name for found in tmp_path.iterdir()] == ["a.json"]


def test_a_block_that_raises_leaves_the_old_file_and_the_next_attempt_works(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), replacing(path) as scratch:
        scratch.write_text("half of a very long ")
        raise ZeroDivisionError
    assert path.read_text() == "old"
    with replacing(path) as scratch:
        scratch.write_text("new")
    assert path.read_text() == "new"


def test_two_files_that_differ_in_their_suffix_have_two_scratch_files(tmp_path: Path) -> None:
    with replacing(tmp_path / "a.json") as first, replacing(tmp_path / "a.yaml") as second:
        assert first != second
        first.write_text("json")
        second.write_text("yaml")
    assert (tmp_path / "a.json").read_text() == "json"


def test_a_folder_replaces_an_older_one_and_what_an_interrupted_call_left(tmp_path: Path) -> None:
    for name in ("step.tmp-removed", "step", "scratch"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    replace_folder(tmp_path / "scratch", tmp_path / "step")
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["step", "step/scratch"]


def test_a_folder_takes_a_name_that_is_free(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    replace_folder(tmp_path / "scratch", tmp_path / "step")
    assert [path.name for path in tmp_path.iterdir()] == ["step"]


def test_an_output_gets_a_name_that_nothing_has(tmp_path: Path) -> None:
    for name in ("out", "out-2", "out-3"):
        assert unused(tmp_path / "out").name == name
        (tmp_path / name).mkdir()


def test_a_process_makes_a_folder_in_its_own_scratch_folder_and_removes_those_of_killed_ones(
    tmp_path: Path,
) -> None:
    name = scratch_of(tmp_path / "out").name
    numbers = ("1", str(2**22 + 1), "2-7")  # the last one: of process 7 on the host HOST-2
    running, killed, elsewhere = (name.replace(f"-{os.getpid()}.", f"-{number}.") for number in numbers)
    for folder in (running, killed, elsewhere, name):
        (tmp_path / folder / "files").mkdir(parents=True)
    made = make_scratch("output", tmp_path / "out")
    assert made.name == name
    assert {path.name for path in tmp_path.iterdir()} == {running, elsewhere, name}
    assert not list(made.iterdir())
    made.rename(tmp_path / "out")
    with pytest.raises(ConfigError, match=r"^output=.*/out: already exists; name a new folder"):
        make_scratch("output", tmp_path / "out")
