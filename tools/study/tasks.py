"""The processes of the study: for each seed a build and a cold start, then the runs that start from them."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from functools import reduce
from pathlib import Path

from megatron_stppo.config_file import load
from tools.study.bases import Base
from tools.study.matrix import Run
from tools.study.work import Task

COMMAND_LINE = (sys.executable, "-m", "megatron_stppo")


def tasks_of(runs: Sequence[Run], root: Path, iterations: int | None = None) -> list[Task]:
    """Return the tasks in an order that finishes seed after seed without waiting for the next cold start."""
    prepared = {(run.seed, run.base.label): _prepare(run.base, run.seed, root) for run in runs}
    tasks: list[Task] = []
    for (seed, label), before in prepared.items():
        own = [run for run in runs if (run.seed, run.base.label) == (seed, label)]
        tasks += before + [_train(run, root, before[-1], iterations) for run in own]
    return tasks


def _prepare(base: Base, seed: int, root: Path) -> list[Task]:
    """Return the tasks of an example's build and cold start with this seed."""
    folder = root / base.folder(seed)
    data, model = folder / "data", folder / "cold-start"
    built = key(*base.sources(), str(seed))
    script = (sys.executable, str(base.builder))
    build = (*script, "--output", str(data), "--seed", str(seed), "--tokens", str(base.tokens))
    start = [
        *base.recipe,
        f"model.path={data / 'model'}",
        f"data.demonstrations={data / 'demonstrations.jsonl'}",
        f"cold_start.output={model}",
        f"run.root={folder}",
        "run.name=cold-start-run",
        f"run.seed={seed}",
        "parallel.tensor=1",
    ]
    begun = key(built, base.config.read_text(encoding="utf-8"), *(x for x in start if str(root) not in x))
    first = base.task("build", seed)
    command = (*COMMAND_LINE, "cold-start", str(base.config), *start)
    return [
        Task(first, build, built, data, seconds=base.build_seconds),
        Task(
            base.task("cold-start", seed), command, begun, model, needs=first, seconds=base.cold_start_seconds
        ),
    ]


def _train(run: Run, root: Path, start: Task, iterations: int | None) -> Task:
    base, seed = run.base, root / run.base.folder(run.seed)
    overrides = run.overrides(iterations)
    paths = [
        f"run.root={root / 'runs'}",
        f"run.name={run.name}",
        f"model.path={seed / 'cold-start'}",
        f"data.train={seed / 'data' / 'train.jsonl'}",
        f"data.evaluate={seed / 'data' / 'evaluate.jsonl'}",
        *(f"{field}={seed / 'data' / name}" for field, name in base.data.items()),
    ]
    total = next(int(x.partition("=")[2]) for x in overrides if x.startswith("run.iterations="))
    return Task(
        run.name,
        (*COMMAND_LINE, "train", str(base.config), *overrides, *paths),
        key(start.key, *overrides),
        root / "runs" / run.name,
        needs=start.name,
        is_run=True,
        seconds=run.seconds(iterations),
        iterations=total,
        processes=run.processes,
    )


def differing(run: Run, config: Path, iterations: int | None = None) -> list[str]:
    """Return the fields of the matrix that differ in the configuration with which a run was made.

    Other fields, such as paths, may differ. Example: ["run.iterations"] for a shorter trial.
    """
    overrides = run.overrides(iterations)
    made, wanted = load(config), load(run.base.config, overrides)
    fields = [override.partition("=")[0] for override in overrides] + ["algorithm"]
    return [x for x in fields if len({repr(reduce(getattr, x.split("."), c)) for c in (made, wanted)}) > 1]


def key(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
