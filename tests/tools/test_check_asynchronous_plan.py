"""The check of forecasts, on run folders that a simulation wrote."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_stppo.config import Config, ConfigError
from megatron_stppo.plan.simulation.asynchronous import AsynchronousRun, AsynchronousSimulation, Window
from megatron_stppo.plan.simulation.buffer import BatchRule
from megatron_stppo.plan.simulation.engine import EngineSpeed, TrainerSpeed
from megatron_stppo.plan.simulation.recorded import read_lengths
from megatron_stppo.plan.simulation.workload import (
    DrawnLengths,
    LogNormal,
    PlannedEpisode,
    RecordedWork,
    Sizes,
    ToolTimes,
    Workload,
)
from tools import check_asynchronous_plan as tool
from tools import slow_search
from tools.check_asynchronous_plan import calibrate, fit, read_run

ENGINE, TRAINER = EngineSpeed(0.01, 0.001), TrainerSpeed(0.2, 1e-4)
LENGTHS = DrawnLengths(LogNormal(30, 60), LogNormal(2, 4), LogNormal(10, 40), LogNormal(20, 40), 400)
ITERATIONS = 6


def test_the_speeds_of_a_run_are_found_again(tmp_path: Path) -> None:
    machine = calibrate([read_run(run(tmp_path / str(tasks), tasks)) for tasks in (4, 64)])
    assert (machine.engine.step, machine.engine.sequence) == pytest.approx((0.01, 0.001), rel=0.01)
    assert (machine.trainer.batch, machine.trainer.token) == pytest.approx((0.2, 1e-4), rel=0.01)
    assert (machine.transfer, machine.publish) == (0.0, 0.0)


def test_predictions_of_other_batches_and_another_bound_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few, many, other = (str(run(tmp_path / str(tasks), tasks)) for tasks in (4, 64, 16))
    ahead = str(run(tmp_path / "ahead", 16, staleness=1))
    assert tool.main(["--calibrate", few, "--calibrate", many, other, ahead, "--limit", "0.05"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "engine: 10.00 ms per step, 1.000 ms per sequence"
    assert [line.partition(":")[0] for line in lines[-2:]] == ["16", "ahead"]
    assert all(line.endswith((": +0%", ": -0%", ": +1%", ": -1%")) for line in lines[-2:])


def test_a_prediction_that_is_wrong_exits_with_1(tmp_path: Path) -> None:
    few, many = (str(run(tmp_path / str(tasks), tasks)) for tasks in (4, 64))
    wrong = run(tmp_path / "wrong", 16, slower=2.0)
    assert tool.main(["--calibrate", few, "--calibrate", many, str(wrong)]) == 1


def test_a_fit_is_not_moved_by_a_disturbed_measurement() -> None:
    steps = [10.0, 20.0, 30.0, 40.0, 10.0, 20.0, 30.0, 40.0]
    tokens = [100.0, 100.0, 500.0, 500.0, 300.0, 400.0, 100.0, 200.0]
    seconds = [0.5 * step + 0.01 * token for step, token in zip(steps, tokens, strict=True)]
    seconds[2] *= 3
    assert fit((steps, tokens), seconds) == pytest.approx([0.5, 0.01])


def test_a_coefficient_that_would_be_negative_is_zero() -> None:
    assert fit(([1.0, 1.0, 1.0], [0.0, 1.0, 2.0]), [3.0, 2.0, 2.0]) == pytest.approx([2.0, 0.0])


def test_recorded_lengths_are_those_of_the_trajectories(tmp_path: Path) -> None:
    """A prompt of 7 tokens, a turn of 3, an observation of 2 and a turn of 4."""
    write(tmp_path, {"serving": {"replicas": 1}}, [[Sizes(((7, 3), (2, 4)))]] * 3, [{"seconds": 1.0}] * 3)
    assert set(read_lengths(tmp_path).records) == {Sizes(((7, 3), (2, 4)))}
    assert read_run(tmp_path).warm[0].tokens == 16


def test_a_folder_without_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--from=.*: holds no trajectories/"):
        read_lengths(tmp_path)
    with pytest.raises(ConfigError, match=r"^RUN_DIR=.*: holds no metrics.jsonl and config.yaml"):
        read_run(tmp_path)


def test_the_seconds_of_a_slow_search_depend_on_seed_and_turn_only() -> None:
    drawn = sorted(slow_search.seconds(seed, turn) for seed in range(5000) for turn in (1, 2))
    assert slow_search.seconds(7, 1) == slow_search.seconds(7, 1) != slow_search.seconds(7, 2)
    assert drawn[5000] == pytest.approx(0.2, rel=0.05)
    assert drawn[9900] == pytest.approx(4.0, rel=0.25)


def episodes(tasks: int) -> list[list[Sizes]]:
    """Return the sizes of the episodes, by iteration."""
    work = Workload(LENGTHS, ToolTimes(), seed=tasks)
    drawn = [work.episode(number).sizes for number in range(tasks * ITERATIONS)]
    return [drawn[first : first + tasks] for first in range(0, len(drawn), tasks)]


def run(folder: Path, tasks: int, staleness: int = 0, slower: float = 1.0) -> Path:
    """Write the folder of an asynchronous run, as a simulation predicts it."""
    sizes = episodes(tasks)
    planned = [PlannedEpisode(one, (0.0,) * (len(one.turns) - 1)) for batch in sizes for one in batch]
    work = RecordedWork(tuple(planned), ToolTimes())
    made = AsynchronousRun(work, BatchRule(tasks, staleness), ENGINE, TRAINER)
    rows = []
    for iteration, batch in enumerate(sizes):
        found = AsynchronousSimulation(made, Window(iteration, 1)).run()
        generated = sum(tokens for one in batch for _, tokens in one.turns)
        training = slower * TRAINER.seconds(sum(one.tokens for one in batch))
        rows.append(
            {
                "seconds": slower * found.iteration_seconds,
                "seconds/rollout": slower * found.iteration_seconds - training,
                "serving/generated_tokens": generated,
                "serving/tokens_per_step": found.running,
                "serving/step_ms": 1000 * (ENGINE.step + ENGINE.sequence * found.running),
            }
        )
    serving = {"replicas": 1, "max_staleness": staleness}
    return write(folder, {"rollout": {"tasks_per_iteration": tasks}, "serving": serving}, sizes, rows)


def write(
    folder: Path,
    sections: dict[str, object],
    sizes: Sequence[Sequence[Sizes]],
    measured: Sequence[dict[str, float]],
) -> Path:
    """Write configuration, metrics and trajectories of a run."""
    (folder / "trajectories").mkdir(parents=True)
    config = Config.model_validate({"model": {"path": "model"}} | sections)
    (folder / "config.yaml").write_text(config.dump())
    rows = []
    for iteration, (batch, row) in enumerate(zip(sizes, measured, strict=True), 1):
        lines = [json.dumps(line(one)) + "\n" for one in batch]
        (folder / "trajectories" / f"iteration-{iteration:05d}.jsonl").write_text("".join(lines))
        rows.append({"iteration": iteration, "seconds/rollout": 0.0} | row)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def line(sizes: Sizes) -> dict[str, object]:
    """Return a line of trajectories/ with these sizes."""
    observations = [read for read, _ in sizes.turns[1:]] + [0]
    turns = [
        {
            "token_ids": [1] * generated,
            "rollout_logprob": [-1.0] * generated,
            "observation_ids": [2] * observation,
            "reward": 0.0,
            "versions": [[0, generated]],
        }
        for (_, generated), observation in zip(sizes.turns, observations, strict=True)
    ]
    task = {"data_source": "game", "targets": ["a"], "split": "train", "index": 0}
    return task | {"prompt_ids": [3] * sizes.turns[0][0], "turns": turns, "outcome": "ok"}
