"""A run that is killed and resumed, and whose vLLM fails once, ends with the bits of a whole run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.training.loop import small_run

TIMES = (
    "seconds",
    "share",
    "memory",
    "rollout/tokens_per_second",
    "update/tokens_per_second",
    "evaluate/tokens_per_second",
)
NOT_EQUAL = (*TIMES, "straggler", "engine/restarts", "attempt", "trajectories/")
KINDS = ("jsonl", "turns.jsonl")
FAILS = "environment.kind=tests.training.loop.failing_engine:factory"


@pytest.fixture(scope="module")
def runs(straight: tuple[Path, Path]) -> tuple[Path, Path]:
    """(folder of 6 uninterrupted iterations, folder of a run that was killed and resumed).

    The second gets SIGKILL after the checkpoint of step 3. It resumes to step 6 with offload, and with an
    engine that fails in its first rollout.
    """
    config, resumed = straight[0], straight[1].with_name("resumed")
    small_run.train_until(resumed / "checkpoints" / "LATEST", config, "run.name=resumed")
    assert not (resumed / "checkpoints" / "step_6").exists(), "the run must be killed before its end"
    given = ("run.name=resumed", "update.offload=all", FAILS, "--resume")
    done = small_run.run("train", config, *given).succeeded()
    assert "megatron-stppo: resumed from step_3 of 6\n" in done.stderr
    return straight[1], resumed


def rows(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(x).items() if not k.startswith(NOT_EQUAL)} for x in lines]


def test_resumed_run_reports_the_same_numbers(runs: tuple[Path, Path]) -> None:
    straight, resumed = map(rows, runs)
    assert [row["iteration"] for row in straight] == [1, 2, 3, 4, 5, 6]
    assert resumed == straight
    assert straight[-1]["actor/gradient_norm"] > 0
    assert not any(row["actor/held"] for row in straight), "the actor must be updated"
    assert [row["actor/first_kl_to_old"] for row in straight] == [0] * 6, "ratios that are not exactly 1"


def test_failed_engine_was_replaced_once_and_the_failure_logged(runs: tuple[Path, Path]) -> None:
    lines = (runs[1] / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["engine/restarts"] for line in lines] == [0, 0, 0, 1, 1, 1]
    logged = (runs[1] / "logs/rank-0.log").read_text()
    assert "engine restart 1 of at most 3: rollout failed on rank 0: EngineFailure: vLLM failed:" in logged


def test_a_finished_run_has_its_report_page(runs: tuple[Path, Path]) -> None:
    for run in runs:
        assert '"name":"' + run.name in (run / "report.html").read_text()
        assert "report.html: not drawn" not in (run / "logs/rank-0.log").read_text()


def test_resumed_run_plays_the_same_tokens(runs: tuple[Path, Path]) -> None:
    files = (f"iteration-{iteration:05d}.{kind}" for iteration in range(1, 7) for kind in KINDS)
    for name in (f"trajectories/{file}" for file in files):
        assert (runs[1] / name).read_text() == (runs[0] / name).read_text()


def test_resumed_run_ends_at_the_same_weights_and_optimizer_state_bitwise(runs: tuple[Path, Path]) -> None:
    """Compares every tensor file of both models' checkpoints, weights and Adam's moments, and what the steps
    read of earlier ones, the guard's spikes and mechanisms and the position in the tasks."""
    straight, resumed = (small_run.tensors(run, 6) for run in runs)
    assert resumed == straight
    before, after = (json.loads((run / "checkpoints/step_6/state.json").read_text()) for run in runs)
    assert after == before
    assert len(before["spikes"]["actor/gradient_norm"]) == 6 and "acting" in before


def fail(config: Path, name: str, how: str, *arguments: str) -> tuple[Path, dict[str, Any]]:
    """(folder, contents of exit.json) of a run whose engine fails as failing_engine.`how` says."""
    kind = f"environment.kind=tests.training.loop.failing_engine:{how}"
    done = small_run.run("train", config, f"run.name={name}", kind, *arguments)
    assert done.returncode == 1, "torchrun turns every failure into 1"
    run = config.parent / "runs" / name
    return run, json.loads((run / "exit.json").read_text())


@pytest.mark.long
@pytest.mark.timeout(600)
def test_engine_that_fails_on_a_gpu_ends_the_process_with_a_checkpoint_and_loses_nothing(
    straight: tuple[Path, Path],
) -> None:
    config, reference = straight
    run, note = fail(config, "lost", "in_new_process")
    step = note["reason"].partition(" ")[0]
    assert note["code"] == 85 and "vLLM failed: MemoryError" in note["reason"]
    assert [path.name for path in (run / "checkpoints").glob("step_*")] == [step]
    assert step in ("step_1", "step_2"), "the last finished iteration, not the third's checkpoint"
    small_run.run("train", config, "run.name=lost", "--resume").succeeded()
    assert rows(run) == rows(reference)
    assert small_run.tensors(run, 6) == small_run.tensors(reference, 6)


@pytest.mark.long
def test_gpu_that_no_longer_works_leaves_the_newest_checkpoint(straight: tuple[Path, Path]) -> None:
    run, note = fail(straight[0], "broken", "of_broken_gpu", "run.checkpoint_every=1")
    newest = (run / "checkpoints/LATEST").read_text().strip()
    assert note["code"] == 85
    assert note["reason"].startswith(f"{newest} of 6 is the newest checkpoint, and a GPU failed after it: ")
