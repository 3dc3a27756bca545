"""tools/study/work.py and ledger.py: processes at a time, interruption and resume."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from tools.study.ledger import StudyLedger
from tools.study.work import Crew, Task, judge, prepare


def test_a_run_of_two_processes_has_both_cores(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def task(name: str, processes: int) -> Task:
        code = f"import time; f = open({str(log)!r}, 'ab', 0); f.write(b'+'); time.sleep(0.2); f.write(b'-')"
        return Task(name, (sys.executable, "-S", "-c", code), "k", tmp_path / name, processes=processes)

    tasks = [task("a", 1), task("b", 2), task("c", 1), task("d", 3)]
    with (tmp_path / "lock").open("w") as lock:
        crew = Crew(StudyLedger(tmp_path / "ledger.json"), tmp_path / "logs", 2, lock.fileno())
        assert crew.work(tasks, math.inf, lambda text: None)
    assert log.read_text() == "+-" * 4


def test_the_ledger_continues_after_a_restart(tmp_path: Path) -> None:
    ledger = StudyLedger(tmp_path / "ledger.json")
    ledger.begin("a", "k1")
    assert StudyLedger(tmp_path / "ledger.json").was_begun("a", "k1"), "killed: its end was not recorded"
    ledger.end("a", "interrupted", 2.0)
    again = StudyLedger(tmp_path / "ledger.json")
    again.begin("a", "k1")
    again.end("a", "done", 3.0)
    last = StudyLedger(tmp_path / "ledger.json")
    assert last.is_done("a", "k1") and not last.is_done("a", "k2")
    assert (entry := last["a"]) is not None and entry.seconds == 5.0, "over both attempts"
    last.begin("a", "k2")
    assert (entry := last["a"]) is not None and entry.seconds == 0.0, "other settings make another task"


# A replacement for training: it sends SIGINT (Ctrl-C) to the study; on SIGUSR1 it writes a checkpoint and
# exits with 85; with --resume it ends at once.
TRAINS = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
if "--resume" in sys.argv:
    sys.exit(0)
def leave(*_):
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "LATEST").touch()
    sys.exit(85)
signal.signal(signal.SIGUSR1, leave)
folder.mkdir()
(folder / "metrics.jsonl").write_text('{"iteration": 3}\\n')
os.kill(os.getppid(), signal.SIGINT)
time.sleep(60)
"""


def test_an_interrupted_study_signals_its_runs_and_the_next_call_resumes_them(tmp_path: Path) -> None:
    def python(name: str, code: str, needs: str = "", **more: Any) -> Task:
        return Task(
            name, (sys.executable, "-c", code, str(tmp_path / name)), "k", tmp_path / name, needs, **more
        )

    start, broken = python("start", "print('built')"), python("broken", "raise SystemExit(3)")
    never = python("never", "print('built')", "broken")
    run = python("run", TRAINS, "start", is_run=True, iterations=9)
    tasks, said = [start, broken, never, run], list[str]()
    with (tmp_path / "lock").open("w") as lock:

        def work(tasks: list[Task], deadline: float) -> bool:
            crew = Crew(StudyLedger(tmp_path / "ledger.json"), tmp_path / "logs", 1, lock.fileno())
            return crew.work(tasks, deadline, said.append)

        assert not work(tasks, time.monotonic()) and not said, "the deadline has passed"
        assert not work(tasks, math.inf)
        entries = json.loads((tmp_path / "ledger.json").read_text())
        known = {name: entry["status"] for name, entry in entries.items()}
        assert known == {"start": "done", "broken": "failed", "run": "interrupted"}
        assert any(x.startswith("interrupted run 3/9") for x in said)
        assert work([start, run], math.inf)
    assert "resumes run" in said
    assert not run.checkpoints.exists(), "a finished run keeps its numbers, not its weights"
    assert (tmp_path / "logs" / "start.log").read_text() == "built\n"


def test_only_files_of_the_same_settings_are_continued(tmp_path: Path) -> None:
    task = Task("run", ("train",), "k", tmp_path / "run", is_run=True)
    (task.checkpoints / "step_1").mkdir(parents=True)
    assert prepare(task, was_begun=True) == ("train", "--resume")
    assert prepare(task, was_begun=False) == ("train",)
    assert not task.folder.exists()


def test_only_a_spent_budget_of_non_finite_steps_is_a_result_among_failures(tmp_path: Path) -> None:
    task = Task("run", (), "k", tmp_path, is_run=True)
    for reason, status in (
        ("6 steps were not finite, run.nonfinite_budget=5; lower the rates", "done"),
        ("no checkpoint can be written", "failed"),
    ):
        (tmp_path / "exit.json").write_text(json.dumps({"code": 93, "reason": reason}))
        assert judge(task, 93, leaving=False)[0] == status
    assert judge(task, -9, leaving=False)[0] == "failed"
    assert judge(task, -10, leaving=True)[0] == "interrupted", (
        "the signal came before its handler was installed"
    )
