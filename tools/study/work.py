"""Run tasks, several at a time, on one core per process. Interrupted tasks are resumed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_stppo.resilience.faults import DO_NOT_RESTART, REQUEUE
from megatron_stppo.telemetry.rows import read
from tools.study.bases import ROOT
from tools.study.ledger import Status, StudyLedger

NOT_FINITE = "steps were not finite"  # part of the reason of exit code 93 that counts as a result
PATIENCE = 300.0  # seconds for an iteration and a checkpoint after the signal to stop
TICK = 0.2
REPORT_EVERY = 60.0


@dataclass(frozen=True)
class Task:
    """A process, which may start others: the trainer of an asynchronous run starts its replica.

    A run trains in `folder` and can be interrupted; other tasks start again from the beginning.
    """

    name: str
    command: tuple[str, ...]
    key: str  # hash of everything that its result depends on
    folder: Path
    needs: str = ""  # the task that must be done before
    is_run: bool = False
    seconds: float = 0.0  # expected time on a core per process
    iterations: int = 0
    processes: int = 1  # that compute at the same time

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def done_iterations(self) -> int:
        metrics = self.folder / "metrics.jsonl"
        rows = read(metrics) if metrics.exists() else []
        return int(rows[-1]["iteration"]) if rows else 0


@dataclass
class Child:
    task: Task
    process: subprocess.Popen[bytes]
    since: float


class Crew:
    """Runs tasks on `jobs` cores. A task with more processes than cores runs alone.

    Example: Crew(ledger, logs, jobs=2, lock=7).work(tasks, time.monotonic() + 3600, print).
    """

    def __init__(self, ledger: StudyLedger, logs: Path, jobs: int, lock: int) -> None:
        """`lock` is an open file that children inherit: it stays locked while one of them is alive."""
        self._ledger, self._logs, self._jobs, self._lock = ledger, logs, jobs, lock
        self._children: list[Child] = []
        self._tried: set[str] = set()
        logs.mkdir(parents=True, exist_ok=True)

    def work(self, tasks: Sequence[Task], deadline: float, say: Callable[[str], None]) -> bool:
        """Run the tasks; return whether all are done.

        At the deadline (of time.monotonic), or at SIGINT or SIGTERM, signal the running tasks to stop and
        wait until they have checkpointed.
        """
        reported, signals = time.monotonic(), list[int]()
        # Signals are recorded instead of raised: an exception between the start of a process and its entry in
        # the list would lose the process. A handler is needed because a shell starts background jobs with
        # SIGINT ignored.
        before = {
            n: signal.signal(n, lambda n, _: signals.append(n)) for n in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            while time.monotonic() < deadline and not signals:
                self._reap(say)
                self._start(tasks, say)
                if not self._children:
                    break
                if time.monotonic() - reported > REPORT_EVERY:
                    reported = time.monotonic()
                    running = [f"{c.task.name} {_place(c.task)}" for c in self._children]
                    say(f"  running: {', '.join(running)}")
                time.sleep(TICK)
            if signals:
                say("interrupted: waiting until the runs have written their checkpoints")
        finally:
            self._leave(say)
            for number, handler in before.items():
                signal.signal(number, handler)
        return all(self._ledger.is_done(task.name, task.key) for task in tasks)

    def _start(self, tasks: Sequence[Task], say: Callable[[str], None]) -> None:
        done = {task.name for task in tasks if self._ledger.is_done(task.name, task.key)}
        for task in tasks:
            busy = sum(child.task.processes for child in self._children)
            if busy >= self._jobs:
                return
            if task.name in self._tried or task.name in done or (task.needs and task.needs not in done):
                continue
            if busy and busy + task.processes > self._jobs:
                return  # a smaller task after it would delay it
            self._tried.add(task.name)
            command = prepare(task, self._ledger.was_begun(task.name, task.key))
            self._ledger.begin(task.name, task.key)
            environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            environment |= {"TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONPATH": str(ROOT)}
            with (self._logs / f"{task.name}.log").open("ab") as log:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    cwd=ROOT,
                    pass_fds=(self._lock,),
                    start_new_session=True,  # signals of the keyboard do not reach it
                )
            self._children.append(Child(task, process, time.monotonic()))
            say(f"{'resumes' if '--resume' in command else 'starts'} {task.name}")

    def _reap(self, say: Callable[[str], None], leaving: bool = False) -> None:
        for child in list(self._children):
            code = child.process.poll()
            if code is None:
                continue
            self._children.remove(child)
            status, reason = judge(child.task, code, leaving)
            if status == "done" and child.task.is_run:
                for name in ("checkpoints", "tensorboard", "heartbeats"):
                    shutil.rmtree(child.task.folder / name, ignore_errors=True)
            seconds = time.monotonic() - child.since
            self._ledger.end(child.task.name, status, seconds, reason)
            log = f"; see {self._logs / child.task.name}.log" if status == "failed" else ""
            say(f"{status} {child.task.name} {_place(child.task)}, {seconds:.0f} s {reason}{log}".rstrip())

    def _leave(self, say: Callable[[str], None]) -> None:
        for child in self._children:
            child.process.send_signal(signal.SIGUSR1 if child.task.is_run else signal.SIGTERM)
        until = time.monotonic() + PATIENCE
        while self._children:
            if time.monotonic() > until:
                for child in self._children:
                    child.process.kill()
            self._reap(say, leaving=True)
            time.sleep(TICK)


def prepare(task: Task, was_begun: bool) -> tuple[str, ...]:
    """Return the command, with --resume if this key's last attempt has checkpoints; else remove its files."""
    if task.is_run and was_begun and task.checkpoints.is_dir() and any(task.checkpoints.iterdir()):
        return (*task.command, "--resume")
    shutil.rmtree(task.folder, ignore_errors=True)
    return task.command


def judge(task: Task, code: int, leaving: bool) -> tuple[Status, str]:
    """Return (status, reason) for the ledger from an exit code.

    A run that used up its budget of steps that are not finite is done, because this is a result. Any other
    failure is not a result; the next call of the study tries it again.
    """
    if code == 0:
        return "done", ""
    note = task.folder / "exit.json"
    text = note.read_text(encoding="utf-8") if task.is_run and note.exists() else ""
    if code == DO_NOT_RESTART and NOT_FINITE in text:
        return "done", NOT_FINITE
    if code == REQUEUE or (leaving and code < 0):
        return "interrupted", ""
    return "failed", f"exit code {code}"


def _place(task: Task) -> str:
    return f"{task.done_iterations()}/{task.iterations}" if task.is_run else ""
