"""Records of earlier runs that do not fit give exit code 2 and one line with field, value and remedy.

They are all detected before torch is imported. A scheduler would requeue a crash (exit code 1) again and
again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.broken_inputs.inputs import Said


@pytest.fixture
def recorded(root: Path) -> Path:
    """The folder of an asynchronous run of one replica, as far as a repetition reads it first."""
    run = root / "runs" / "first"
    (run / "serving" / "journal").mkdir(parents=True)
    (run / "configs").mkdir()
    (run / "configs" / "attempt-1.yaml").touch()
    (run / "config.yaml").write_text((root / "run.yaml").read_text() + "serving: {replicas: 1}\n")
    line = {"step": 0, "assigned": [0, 1], "answers": [], "version": 0, "hold": False}
    write_lines(run / "serving" / "journal" / "replica-0.jsonl", json.dumps(line))
    write_lines(run / "serving" / "batches.jsonl", '{"iteration": 0, "groups": [0]}')
    return run


def write_lines(path: Path, *lines: str) -> None:
    path.write_text("".join(line + "\n" for line in lines))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            lambda run: write_lines(
                run / "config.yaml", *(run / "config.yaml").read_text().splitlines()[:-1]
            ),
            "RUN_DIR={run}: serving.replicas=null: the run was colocated and has no journal; give an "
            "asynchronous run, or replay --records rollouts",
        ),
        (
            lambda run: (run / "configs" / "attempt-2.yaml").touch(),
            "RUN_DIR={run}: was resumed, so its journal is not complete; give another run",
        ),
        (
            lambda run: (run / "serving" / "journal" / "replica-0.jsonl").unlink(),
            "RUN_DIR={run}: has no serving/journal; give an asynchronous run",
        ),
        (
            lambda run: write_lines(run / "serving" / "journal" / "replica-0.jsonl", '{"step": 1}'),
            "{run}/serving/journal/replica-0.jsonl: line 1 cannot be used (Object missing required "
            "field `assigned`); give the file as it was written",
        ),
        (
            lambda run: write_lines(
                run / "serving" / "journal" / "replica-1.jsonl",
                '{"step": 3, "assigned": [1], "answers": [], "version": null}',
            ),
            "RUN_DIR={run}: replica-0 and replica-1 have both played episode 1, so a replica was lost, at a "
            "moment that is not recorded; give another run",
        ),
        (
            lambda run: write_lines(run / "serving" / "batches.jsonl", '{"iteration": 0}'),
            "{run}/serving/batches.jsonl: line 1 cannot be used (Object missing required field `groups`); "
            "give the file as it was written",
        ),
        (
            lambda run: (run / "serving" / "batches.jsonl").unlink(),
            "{run}/serving/batches.jsonl: cannot be read (No such file or directory); give the folder of an "
            "asynchronous run",
        ),
    ],
    ids=["colocated", "resumed", "no journal", "damaged", "lost", "damaged batches", "no batches"],
)
def test_a_journal_that_cannot_repeat_a_run_is_refused(
    root: Path, said: Said, recorded: Path, change: Callable[[Path], None], line: str
) -> None:
    change(recorded)
    message = said("replay", recorded, "--records", "journal", "run.name=again")
    assert message == line.replace("{run}", str(recorded))
    assert not (root / "runs" / "again").exists()


def test_a_repetition_has_another_folder_than_the_recorded_run(said: Said, recorded: Path) -> None:
    (recorded / "metrics.jsonl").write_text("{}\n")
    message = said("replay", recorded, "--records", "journal", "run.name=first")
    assert message == f"run.name=first: {recorded} holds metrics.jsonl; give another run.name"


def test_a_journal_is_repeated_from_its_beginning(said: Said, recorded: Path) -> None:
    message = said("replay", recorded, "--records", "journal", "run.name=again", "--start", "step_3")
    assert message == "--start=step_3: a journal is repeated from its beginning; remove --start"


def test_log_probs_of_nucleus_sampling_are_not_audited(said: Said, recorded: Path) -> None:
    (recorded / "trajectories").mkdir()
    assert said("audit", recorded).endswith("trajectories/ holds no iteration to audit; choose another run")
    (recorded / "trajectories" / "iteration-00001.jsonl").touch()
    config = (recorded / "config.yaml").read_text().replace("rollout:\n", "rollout:\n  top_p: 0.5\n")
    (recorded / "config.yaml").write_text(config)
    assert said("audit", recorded).startswith("rollout.top_p=0.5: the engine's log-probs are of the tokens")
