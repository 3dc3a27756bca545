"""Measure colocated and asynchronous training with tools that have a long tail, on the quickstart's task.

    make quickstart-async                                    # builds the model and the data
    python tools/measure_asynchronous.py [--iterations 12] [--root runs/measured]

Every row is a run on the same two cores: colocated with two ranks, or asynchronous with one rank and one
replica, for bounds 0, 1, 2 and 4 of the staleness. Each case is run with a retriever whose seconds are
log-normal (slow_search.py: median 0.2 s, 1 in 100 above 4 s), and with one that does not wait. Prints a
Markdown table. Numbers are medians over iterations, without the first two, which fill the pipeline. Measure
on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).parent
CONFIG = TOOLS.parent / "examples" / "quickstart" / "asynchronous.yaml"
SLOW = "environment.kind=slow_search:factory"
FIRST = 2  # iterations that are left out
COMMON = ("run.evaluate_every=0", "run.checkpoint_every=1000", "rollout.overlap_tools=true")
COLOCATED = ("serving.replicas=null", "parallel.tensor=2")


@dataclass(frozen=True)
class Case:
    """One run. Example: Case("colocated", 2, COLOCATED)."""

    name: str
    ranks: int
    overrides: tuple[str, ...]


def served(bound: int) -> Case:
    return Case(f"asynchronous, bound {bound}", 1, (f"serving.max_staleness={bound}",))


CASES = (Case("colocated", 2, COLOCATED), *(served(bound) for bound in (0, 1, 2, 4)))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--root", type=Path, default=Path("runs/measured"))
    parser.add_argument("overrides", nargs="*", metavar="section.field=value")
    given = parser.parse_args()
    print("| training | tool | s per iteration | tokens/s | trainer idle | replica idle | staleness (max) |")
    print("|---|---|---|---|---|---|---|")
    for case in CASES:
        for tool, kind in (("no wait", ()), ("long tail", (SLOW,))):
            rows = run(case, given, kind)
            print(f"| {case.name} | {tool} | {cells(rows)} |", flush=True)
    return 0


def run(case: Case, given: argparse.Namespace, kind: Sequence[str]) -> list[dict[str, Any]]:
    """Train, and return the rows of metrics."""
    name = f"{case.name}-{'tail' if kind else 'plain'}".replace(", ", "-").replace(" ", "-")
    overrides = (f"run.name={name}", f"run.root={given.root}", f"run.iterations={given.iterations}")
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.ranks}")
    command = [sys.executable, *launcher, "-m", "megatron_stppo", "train", str(CONFIG)]
    command += [*overrides, *COMMON, *case.overrides, *kind, *given.overrides]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(TOOLS)}
    log = given.root / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        subprocess.run(command, stdout=output, stderr=output, check=True, env=environment)
    lines = (given.root / name / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["iteration"] > FIRST]


def cells(rows: Sequence[dict[str, Any]]) -> str:
    def median(name: str) -> float:
        return statistics.median(row[name] for row in rows)

    seconds = [row["seconds"] for row in rows]
    tokens = sum(row["rollout/action_tokens"] for row in rows)
    idle = (
        [f"{100 * median('serving/trainer_idle_share'):.0f} %", f"{100 * median('serving/idle_share'):.0f} %"]
        if "serving/idle_share" in rows[0]
        else ["-", "-"]
    )
    mean, most = (
        statistics.fmean(r["rollout/staleness"] for r in rows),
        max(r["rollout/staleness_max"] for r in rows),
    )
    columns = [
        f"{statistics.median(seconds):.2f}",
        f"{tokens / sum(seconds):,.0f}",
        *idle,
        f"{mean:.2f} ({most})",
    ]
    return " | ".join(columns)


if __name__ == "__main__":
    sys.exit(main())
