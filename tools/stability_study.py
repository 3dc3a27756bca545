"""Train the family of algorithms off policy on the quickstart's task, to see which collapse, and when.

    python -m tools.stability_study [--only family] [--settings gentle,harsh_2] [--seeds 0-4] [--jobs 2]
        [--budget-minutes 60] [--plan] [--report]

A run is a process on one core, or two processes on two cores if rollouts lag. All runs of a seed and an
example share a build and a cold start. A finished run is skipped. A run that was interrupted (by the budget
or Ctrl-C) continues from its checkpoint.

docs/study/first-round.md has the protocol of the first round, docs/study/protocol.md that of the second, and
docs/lora.md that of adapters. At the end, the program updates their tables and figures, and the small files
in docs/study/ from which these are made. With --report it does only this, from existing results.
"""

from __future__ import annotations

import argparse
import fcntl
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # needed when this file is run as a script

from rich.console import Console

from megatron_stppo.telemetry.rows import read
from tools.study import adapter_report, collect, matrix, second_round
from tools.study.adapter_settings import ADAPTED
from tools.study.bases import ROOT
from tools.study.ledger import StudyLedger
from tools.study.report import report, sections
from tools.study.tasks import differing, tasks_of
from tools.study.work import NOT_FINITE, Crew, Task

# {name of a part: (its document, the function that returns its lines)}
PARTS = {
    "first round": ("study/first-round.md", sections),
    "second round": ("study.md", second_round.sections),
    "adapters": ("lora.md", adapter_report.sections),
}
console = Console(stderr=True, highlight=False, soft_wrap=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if all requested runs are done, 1 if some are left or failed, 2 for wrong arguments."""
    given = parse(argv)
    try:
        chosen = [x.split(",") for x in (given.only, given.settings)]
        runs = matrix.select(chosen[0], matrix.seeds_of(given.seeds), chosen[1])
        root = given.root.resolve()
        root.mkdir(parents=True, exist_ok=True)
        ledger, done = StudyLedger(root / "ledger.json"), True
        if not given.report:
            tasks = tasks_of(runs, root, given.iterations)
            keep_results(tasks, ledger)
            show_plan(tasks, ledger, given.jobs)
            if given.plan:
                return 0
            done = work(tasks, ledger, root, given.jobs, given.budget_minutes)
        gather(runs, ledger, root, given.docs / "study", given.iterations)
        for part in sorted({part_of(run) for run in runs}):
            document, made_of = PARTS[part]
            report(given.docs / "study", given.docs / document, made_of)
    except ValueError as error:
        print(f"stability_study: {error}", file=sys.stderr)
        return 2
    return int(not done)


def part_of(run: matrix.Run) -> str:
    """Return the key of PARTS."""
    if run.setting in ADAPTED:
        return "adapters"
    return "second round" if run.setting in matrix.SECOND_ROUND else "first round"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    groups = ", ".join(f"{name} ({', '.join(group)})" for name, group in matrix.GROUPS.items())
    parser.add_argument("--only", default="family", help=f"algorithms or groups of algorithms: {groups}")
    parser.add_argument(
        "--settings", default=",".join(matrix.STUDIED), help=f"settings: any of {', '.join(matrix.SETTINGS)}"
    )
    parser.add_argument("--seeds", default="0-4", help="for example 0-4 or 0,7")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="processes at a time (default: number of cores)"
    )
    parser.add_argument(
        "--budget-minutes", type=float, default=math.inf, help="after this time, write checkpoints and stop"
    )
    parser.add_argument("--iterations", type=int, help="iterations of a run, for a trial (default: 100)")
    parser.add_argument("--plan", action="store_true", help="print the runs and the expected time, and stop")
    parser.add_argument(
        "--report", action="store_true", help="only write the tables and figures, from existing results"
    )
    parser.add_argument("--root", type=Path, default=ROOT / "runs" / "study", help="folder for the runs")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder that contains study/")
    return parser.parse_args(argv)


def keep_results(tasks: Sequence[Task], ledger: StudyLedger) -> None:
    """Raise ValueError if a task would replace a result of other settings or another quickstart.

    Such a result takes hours to compute.
    """
    for task in tasks:
        entry = ledger[task.name]
        if entry is not None and entry.status == "done" and entry.key != task.key:
            raise ValueError(
                f"{task.folder} was made with other settings; move it and its entry in ledger.json away, "
                "or give another --root"
            )


def show_plan(tasks: Sequence[Task], ledger: StudyLedger, jobs: int) -> None:
    """Print the remaining tasks and their expected hours on `jobs` cores."""
    left = [task for task in tasks if not ledger.is_done(task.name, task.key)]
    runs = [task for task in left if task.is_run]
    seconds = sum(task.processes * expected(task, tasks, ledger) for task in left)
    before = len(left) - len(runs)
    console.print(
        f"{len(tasks)} tasks, {len(tasks) - len(left)} done; left: {before} builds and cold starts, "
        f"{len(runs)} runs; about {seconds / 3600 / jobs:.1f} hours with {jobs} at a time"
    )
    for task in left:
        again = " (interrupted)" if ledger.was_begun(task.name, task.key) else ""
        console.print(f"  {task.name}{again}  {expected(task, tasks, ledger):.0f} s")


def expected(task: Task, tasks: Sequence[Task], ledger: StudyLedger) -> float:
    """Return the expected remaining seconds of a task.

    This is the time of finished tasks of the same kind, else the table's time, less the part that is done.
    """
    kind = task.name.rpartition("-")[0]
    took = [
        entry.seconds
        for other in tasks
        if other.name.rpartition("-")[0] == kind and ledger.is_done(other.name, other.key)
        for entry in [ledger[other.name]]
        if entry is not None
    ]
    whole = sum(took) / len(took) if took else task.seconds
    begun = ledger.was_begun(task.name, task.key) and task.checkpoints.is_dir()
    return whole * (1 - task.done_iterations() / task.iterations if begun else 1)


def work(tasks: Sequence[Task], ledger: StudyLedger, root: Path, jobs: int, minutes: float) -> bool:
    """Run the tasks; return whether all are done. Raises ValueError if another study uses the same folder."""
    started = time.monotonic()
    with (root / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"--root {root} is in use by another study or one of its runs; wait") from None

        def say(text: str) -> None:
            done = sum(ledger.is_done(task.name, task.key) for task in tasks)
            open_ = [task for task in tasks if not ledger.is_done(task.name, task.key)]
            left = sum(task.processes * expected(task, tasks, ledger) for task in open_)
            passed = (time.monotonic() - started) / 60
            ahead = f"about {left / 60 / jobs:.0f} min left"
            console.print(f"[{done}/{len(tasks)}] {passed:.0f} min, {ahead}: {text}", markup=False)

        crew = Crew(ledger, root / "logs", jobs, lock.fileno())
        return crew.work(tasks, started + 60 * minutes, say)


def gather(
    runs: Sequence[matrix.Run], ledger: StudyLedger, root: Path, folder: Path, iterations: int | None = None
) -> None:
    """Write the numbers of finished runs into the files of `folder`.

    Raises ValueError if the settings of a run differ from those that its name has now.
    """
    summaries, curves, steps = [], [], []
    for run in runs:
        entry, path = ledger[run.name], root / "runs" / run.name
        if entry is None or entry.status != "done":
            continue
        if other := differing(run, path / "config.yaml", iterations):
            raise ValueError(
                f"{path} was made with different values of {', '.join(other)}; move it and its entry in "
                "ledger.json away, or give another --root"
            )
        rows = read(path / "metrics.jsonl")
        summaries.append(collect.summary(run, rows, entry.reason == NOT_FINITE, entry.seconds))
        curves += collect.curves(run, rows)
        steps += collect.steps(run, path)
    if summaries:
        collect.merge(folder, summaries, curves, steps)


if __name__ == "__main__":
    sys.exit(main())
