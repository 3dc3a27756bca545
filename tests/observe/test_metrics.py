from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_stppo.observe import metrics as module
from megatron_stppo.observe.metrics import Metrics, progress
from megatron_stppo.observe.run_files import column, read_rows, truncate, write_steps


class Clock:
    """A clock that a test moves forward by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    monotonic = perf_counter


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_every_second_belongs_to_exactly_one_phase(tmp_path: Path, clock: Clock) -> None:
    metrics = Metrics(tmp_path, 0)
    with metrics.phase("rollout"):
        clock.now += 2
        with metrics.phase("reshard"):  # interrupts the rollout
            clock.now += 1
        clock.now += 4
    clock.now += 1
    row = metrics.log(1, {})
    metrics.close()
    assert row["seconds"] == 8
    assert (row["seconds/rollout"], row["seconds/reshard"], row["seconds/other"]) == (6, 1, 1)
    assert (row["share/rollout"], row["share/reshard"], row["share/other"]) == (0.75, 0.125, 0.125)


def test_every_row_starts_its_own_clock(tmp_path: Path, clock: Clock) -> None:
    metrics = Metrics(tmp_path, 0)
    clock.now += 5
    metrics.log(1, {})
    clock.now += 1
    assert metrics.log(2, {})["seconds"] == 1
    metrics.close()


def test_a_phase_that_raises_is_ended_too(tmp_path: Path, clock: Clock) -> None:
    metrics = Metrics(tmp_path, 0)
    with pytest.raises(ZeroDivisionError), metrics.phase("update"):
        clock.now += 1
        _ = 1 / 0
    clock.now += 1
    assert metrics.log(1, {})["seconds/update"] == 1
    metrics.close()


def test_rows_are_valid_json_where_numbers_are_not_finite(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, 0)
    metrics.log(1, {"kl": math.nan, "bound": math.inf, "reward": 0.5})
    metrics.close()

    def refuse(name: str) -> None:
        raise AssertionError(name)

    row = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert (row["kl"], row["bound"], row["reward"]) == (None, None, 0.5)


def test_only_the_first_rank_writes(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "run", 1)
    metrics.log(1, {"reward": 1.0})
    metrics.close()
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_replaces_the_rows_after_its_checkpoint(tmp_path: Path) -> None:
    first = Metrics(tmp_path, 0)
    for iteration in (1, 2, 3):
        first.log(iteration, {"reward": 0.0})
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 4, "rew')  # the crash is here
    second = Metrics(tmp_path, 0, resumed_at=2)
    second.log(3, {"reward": 1.0})
    second.close()
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [(row["iteration"], row["reward"]) for row in rows] == [(1, 0.0), (2, 0.0), (3, 1.0)]


def test_a_new_run_in_an_old_folder_starts_empty(tmp_path: Path) -> None:
    for reward in (0.0, 1.0):
        metrics = Metrics(tmp_path, 0)
        metrics.log(1, {"reward": reward})
        metrics.close()
    assert [row["reward"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1.0]


def test_tensorboard_has_the_same_numbers(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, 0)
    metrics.log(7, {"reward": 0.25, "note": "text is left out"})
    metrics.close()
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in board.Scalars("reward")] == [(7, 0.25)]


@pytest.mark.parametrize(("resumed_at", "kept"), [(0, [0, 1]), (2, [0, 1, 2, 3])])
def test_tensorboard_loses_the_points_that_a_resumed_run_repeats(
    tmp_path: Path, resumed_at: int, kept: list[int]
) -> None:
    killed = Metrics(tmp_path, 0)
    for iteration in (0, 1, 2, 3, 4):
        killed.log(iteration, {"reward": 0.0})
    killed.close()
    (events,) = (tmp_path / "tensorboard").iterdir()
    events.rename(events.with_name("events.out.tfevents.0000000001"))  # of an earlier second
    resumed = Metrics(tmp_path, 0, resumed_at=resumed_at)
    for iteration in kept:
        if iteration > resumed_at or not resumed_at:
            resumed.log(iteration, {"reward": 1.0})
    resumed.close()
    board = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [row["iteration"] for row in rows] == kept
    points = [(event.step, event.value) for event in board.Scalars("reward")]
    assert points == [(row["iteration"], row["reward"]) for row in rows]


def test_a_column_skips_rows_without_a_number() -> None:
    rows = [{"iteration": 1, "kl": 0.5}, {"iteration": 2, "kl": None}, {"iteration": 3}]
    assert column(rows, "kl") == ([1], [0.5])


def test_progress_without_a_terminal_is_an_occasional_plain_line(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in progress(range(4), "cold start", every=2.0):
        clock.now += 1
    assert capsys.readouterr().err.splitlines() == ["cold start 2/4, 2 s", "cold start 4/4, 4 s"]


def test_progress_prints_nothing_for_a_caller_that_prints_its_own_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert list(progress([1, 2], "st_ppo", every=None)) == [1, 2]
    assert capsys.readouterr().err == ""


def test_other_ranks_show_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(progress([1, 2], "cold start", enabled=False, every=0.0)) == [1, 2]
    assert capsys.readouterr().err == ""


def test_the_steps_of_a_repeated_iteration_replace_the_earlier_ones(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    for iteration, norms in ((1, [1.0, 2.0]), (2, [3.0, 4.0]), (2, [5.0, math.nan])):
        write_steps(path, iteration, [{"norm": norm} for norm in norms])
    found = [(row["iteration"], row["step"], row["norm"]) for row in read_rows(path)]
    assert found == [(1, 1, 1.0), (1, 2, 2.0), (2, 1, 5.0), (2, 2, None)]


def test_zeros_that_a_loss_of_power_left_in_the_rows_do_not_prevent_a_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"iteration": 1}\n\0\0\0\0\n[1]\n{"iteration": 3}\n{"iteration": 4}\n{"iter')
    truncate(path, 3)
    assert path.read_text() == '{"iteration": 1}\n{"iteration": 3}\n'
    assert caplog.messages == [f"{path}: 2 damaged lines are left out"]
