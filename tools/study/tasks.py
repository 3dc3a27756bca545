"""The processes of the study: per seed a build and a cold start, then the runs that start from them."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from functools import reduce
from pathlib import Path

from megatron_stppo.config_file import load
from tools.study.matrix import BUILD, COLD_START, Run
from tools.study.work import ROOT, Task

QUICKSTART = ROOT / "examples" / "quickstart"
CONFIG = QUICKSTART / "config.yaml"
DRIVER = ("run.py", "stages.py")  # the quickstart's driver; the built files do not depend on it
COMMAND_LINE = (sys.executable, "-m", "megatron_stppo")
# The cold start of the study's results. The quickstart's own is shorter.
TOKENS = 3_200_000
RECIPE = ("cold_start.lr=3.0e-3", "cold_start.batch_tokens=1024", "cold_start.context_weight=1.0")


def tasks_of(runs: Sequence[Run], root: Path, iterations: int | None = None) -> list[Task]:
    """Return the tasks in an order that finishes seed after seed without waiting for the next cold start."""
    prepared = {run.seed: _prepare(run.seed, root) for run in runs}
    tasks: list[Task] = []
    for seed, before in prepared.items():
        tasks += before
        tasks += [_train(run, root, before[-1], iterations) for run in runs if run.seed == seed]
    return tasks


def _prepare(seed: int, root: Path) -> list[Task]:
    """Return the tasks of the quickstart's build and cold start with this seed."""
    folder = root / f"seed-{seed}"
    data, model = folder / "data", folder / "cold-start"
    sources = [path.read_text(encoding="utf-8") for path in sorted(QUICKSTART.glob("*.py"))]
    names = [path.name for path in sorted(QUICKSTART.glob("*.py"))]
    built = key(*(text for name, text in zip(names, sources, strict=True) if name not in DRIVER), str(seed))
    script = (sys.executable, str(QUICKSTART / "build.py"))
    build = (*script, "--output", str(data), "--seed", str(seed), "--tokens", str(TOKENS))
    start = [
        *RECIPE,
        f"model.path={data / 'model'}",
        f"data.demonstrations={data / 'demonstrations.jsonl'}",
        f"cold_start.output={model}",
        f"run.root={folder}",
        "run.name=cold-start-run",
        f"run.seed={seed}",
        "parallel.tensor=1",
    ]
    begun = key(built, CONFIG.read_text(encoding="utf-8"), *(x for x in start if str(root) not in x))
    first = f"build-{seed}"
    return [
        Task(first, build, built, data, seconds=BUILD),
        Task(
            f"cold-start-{seed}",
            (*COMMAND_LINE, "cold-start", str(CONFIG), *start),
            begun,
            model,
            needs=first,
            seconds=COLD_START,
        ),
    ]


def _train(run: Run, root: Path, start: Task, iterations: int | None) -> Task:
    seed = root / f"seed-{run.seed}"
    overrides = run.overrides(iterations)
    paths = [
        f"run.root={root / 'runs'}",
        f"run.name={run.name}",
        f"model.path={seed / 'cold-start'}",
        f"data.train={seed / 'data' / 'train.jsonl'}",
        f"data.evaluate={seed / 'data' / 'evaluate.jsonl'}",
        f"environment.retrieval.index={seed / 'data' / 'index'}",
    ]
    total = next(int(x.partition("=")[2]) for x in overrides if x.startswith("run.iterations="))
    return Task(
        run.name,
        (*COMMAND_LINE, "train", str(CONFIG), *overrides, *paths),
        key(start.key, *overrides),
        root / "runs" / run.name,
        needs=start.name,
        is_run=True,
        seconds=run.seconds(iterations),
        iterations=total,
    )


def differing(run: Run, config: Path, iterations: int | None = None) -> list[str]:
    """Return the fields of the matrix that differ in the configuration with which a run was made.

    Other fields, such as paths, may differ. Example: ["run.iterations"] for a shorter trial.
    """
    overrides = run.overrides(iterations)
    made, wanted = load(config), load(CONFIG, overrides)
    fields = [override.partition("=")[0] for override in overrides] + ["algorithm"]
    return [x for x in fields if len({repr(reduce(getattr, x.split("."), c)) for c in (made, wanted)}) > 1]


def key(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
