"""Whole runs in which too many episodes fail: no trained iteration is lost, and no failure is hidden."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_stppo.config.file import load
from tests.chaos import drawn_tasks
from tests.replicas.test_promises import SERVED, rows, start, weights
from tests.training.loop import small_run

GIVEN = (
    "parallel.tensor=1",
    "run.checkpoint_every=1000",
    "evaluate.tasks=3",
    "environment.kind=tests.replicas.breaking:factory",
)
KINDS = {"colocated": (), "served": (*SERVED, "serving.max_staleness=0")}
Train = Callable[..., str]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """A function that trains, and returns what was printed."""
    config = small_run.write(tmp_path_factory.mktemp("failed"))
    tasks, held = config.parent / "tasks.jsonl", config.parent / "held.jsonl"
    lines = [json.loads(line) | {"data_source": "held"} for line in tasks.read_text().splitlines()]
    held.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def train(name: str, *given: str, status: int = 0, **variables: str) -> str:
        arguments = (f"data.evaluate={held}", f"run.name={name}", *GIVEN, *given)
        return start(["train", str(config), *arguments], status, **variables)

    train.config = config  # type: ignore[attr-defined]
    return train


def folder(train: Any, name: str) -> Path:
    return train.config.parent / "runs" / name


def steps(run: Path) -> list[str]:
    return [path.name for path in (run / "checkpoints").glob("step_*")]


@pytest.mark.parametrize("kind", ["served", pytest.param("colocated", marks=pytest.mark.long)])
def test_an_evaluation_that_fails_leaves_a_checkpoint_and_is_repeated_by_resumed_runs_until_it_succeeds(
    train: Train, kind: str
) -> None:
    given, run = (*KINDS[kind], "run.iterations=2", "run.evaluate_every=2"), folder(train, kind)
    train(f"{kind}-whole", *given)
    whole = folder(train, f"{kind}-whole")
    for resumes, succeed in ((False, "3"), (True, "0")):  # the evaluation of the model succeeds
        train(kind, *given, *(["--resume"] if resumes else []), status=1, EVALUATED=succeed)
        assert "3 of 3 episodes failed" in json.loads((run / "exit.json").read_text())["reason"]
        assert steps(run) == ["step_2"]
        assert [row["iteration"] for row in rows(run)] == [0, 1, 2]
        assert "evaluate/exact_match" not in rows(run)[-1] and rows(run)[:-1] == rows(whole)[:-1]
    train(kind, *given, "--resume")
    assert rows(run) == rows(whole) and weights(run, 2) == weights(whole, 2)


def test_a_batch_of_replicas_that_fails_leaves_a_checkpoint_and_no_task_is_lost_or_trained_twice(
    train: Train,
) -> None:
    given, run = (*SERVED, "run.iterations=4", "run.evaluate_every=0"), folder(train, "batch")
    train("batch", *given, status=1, TRAINED="9")
    assert "3 of 4 episodes failed" in json.loads((run / "exit.json").read_text())["reason"]
    assert steps(run) == ["step_2"]
    assert "resumed from step_2 of 4" in train("batch", *given, "--resume")
    assert drawn_tasks.check(load(train.config, [*GIVEN, *given, "run.name=batch"])) == 16  # type: ignore
