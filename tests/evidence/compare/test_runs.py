"""A grid of real runs: interrupted, continued, and compared."""

from __future__ import annotations

import csv
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from megatron_stppo.base.errors import ConfigError
from megatron_stppo.evidence.compare import contrasts, runner
from megatron_stppo.evidence.compare.grid import Grid
from tests.forking import stand_in
from tests.training.loop import small_run


def compare(grid: Path, *options: str) -> subprocess.Popen[str]:
    command = [stand_in.python(), "-m", "megatron_stppo", "compare", str(grid), *options]
    out = subprocess.PIPE
    return subprocess.Popen(command, stdout=out, stderr=out, text=True, env=small_run.ENVIRONMENT)


def test_a_grid_is_continued_and_no_cell_runs_twice(tmp_path: Path) -> None:
    small_run.write(tmp_path)
    grid = {
        "config": "config.yaml",
        "overrides": {"parallel.tensor": 1, "run.iterations": 2, "run.checkpoint_every": 1},
        "arms": {"low": {"update.actor.lr": 1e-4}, "high": {}},
        "seeds": [0, 1],
        "outcome": {"metric": "reward/mean"},
        "contrasts": [{"family": "rate", "pairs": [["high", "low"]]}],
    }
    path, folder = tmp_path / "grid.yaml", tmp_path / "runs" / "grid"
    path.write_text(yaml.safe_dump(grid))
    with compare(path, "--jobs", "1") as first:
        until = time.monotonic() + 200
        while not (folder / "base-low-0/checkpoints/LATEST").exists() and time.monotonic() < until:
            time.sleep(0.05)
        with compare(path) as second:
            assert "another `compare`" in second.communicate()[1] and second.returncode == 2
        first.send_signal(signal.SIGINT)
        _, told = first.communicate(timeout=200)
    assert first.returncode == 1 and "give the same command to continue" in told, told[-2000:]
    with compare(path, "--jobs", "2") as again:
        out, told = again.communicate(timeout=200)
    assert again.returncode == 0, told[-2000:]
    assert "high - low |" in out and str(folder / "grid.html") in out
    with (folder / "cells.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert sorted((row["arm"], row["seed"]) for row in rows) == [
        ("high", "0"), ("high", "1"), ("low", "0"), ("low", "1")
    ]  # fmt: skip
    assert {row["iterations"] for row in rows} == {"2"} and len({row["device"] for row in rows}) == 1
    with compare(path) as third:
        _, told = third.communicate(timeout=60)
    assert third.returncode == 0 and "4 of 4 cells are done" in told and "starts" not in told


def test_a_wrong_field_of_an_arm_ends_the_command_before_any_run(tmp_path: Path) -> None:
    small_run.write(tmp_path)
    grid = {"config": "config.yaml", "arms": {"a": {"update.actor.lrr": 1}}, "seeds": [0]}
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(grid))
    with compare(tmp_path / "grid.yaml") as process:
        _, told = process.communicate(timeout=60)
    assert process.returncode == 2 and "did you mean update.actor.lr?" in told
    assert not (tmp_path / "runs").exists()


def test_a_run_that_fails_is_named_with_its_log(tmp_path: Path) -> None:
    small_run.write(tmp_path)
    grid = {"config": "config.yaml", "arms": {"a": {"model.path": str(tmp_path / "none")}}, "seeds": [0]}
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(grid))
    with compare(tmp_path / "grid.yaml") as process:
        _, told = process.communicate(timeout=60)
    log = tmp_path / "runs/grid/logs/base-a-0.log"
    assert process.returncode == 1 and f"failed: base-a-0: exit code 2; see {log}" in told
    assert "no such folder" in log.read_text()


@pytest.mark.parametrize(
    ("gpus", "processes", "jobs", "places"),
    [(2, 1, None, ["0", "1"]), (2, 1, 5, ["0", "1", "0", "1", "0"]), (4, 2, 3, ["0,1", "2,3", "0,1"])],
)
def test_more_runs_than_gpus_share_them(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    processes: int,
    jobs: int | None,
    places: list[str],
) -> None:
    small_run.write(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(contrasts, "devices", lambda: ("a GPU", gpus))
    given: list[str] = []

    class Started:
        def __init__(self, *_: object, env: dict[str, str], **__: object) -> None:
            given.append(env["CUDA_VISIBLE_DEVICES"])

    monkeypatch.setattr(runner.subprocess, "Popen", Started)
    folder = tmp_path / "runs"
    grid = Grid(
        config=tmp_path / "config.yaml", folder=folder, processes=processes, arms={"a": {}}, seeds=[0]
    )
    one = runner.Runner(grid, jobs)
    for seed in range(one._jobs):
        one._start(runner.Cell("a", "base", seed))
    assert given == places


def test_a_run_that_needs_more_gpus_than_there_are_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_run.write(tmp_path)
    monkeypatch.setattr(contrasts, "devices", lambda: ("a GPU", 2))
    grid = Grid(
        config=tmp_path / "config.yaml", folder=tmp_path / "runs", processes=4, arms={"a": {}}, seeds=[0]
    )
    with pytest.raises(ConfigError, match="processes=4: each run needs as many GPUs, and there are 2"):
        runner.Runner(grid, None)
