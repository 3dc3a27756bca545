"""Train a search agent from nothing. Every stage is a process; a stage that is done is skipped.

    python examples/quickstart/run.py [--example quickstart] [--seed 0] [--cold-start] [field=value ...]

The stages are build, cold-start and train. The quickstart has a model that is cold-started, in
examples/quickstart/model; there cold-start is a stage only with --cold-start. In the end the program prints
a table and writes summary.json and report.html into the run's folder. FOLDER/logs/STAGE.log has
the output of a stage. After an interruption, the same command continues where it stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ledger import Stage, StageLedger, alone
from rich.console import Console
from rich.table import Table
from stages import forward

from megatron_stppo.base.printing import drop_unwritable
from megatron_stppo.config import Config, ConfigError
from megatron_stppo.config.file import load
from megatron_stppo.observe.report import page
from megatron_stppo.observe.run_files import read_rows
from megatron_stppo.validation import checks

HERE = Path(__file__).parent
CONFIG = HERE / "config.yaml"


@dataclass(frozen=True)
class Example:
    builder: Path  # the script that builds the files
    config: Path


CHOICE, SUMS = HERE.parent / "medical_choice", HERE.parent / "reasoning_gym"
HOSTED, KEYS, SMOLLM2 = (HERE.parent / name for name in ("hosted_agent", "key_chain", "smollm2"))
TEXTWORLD = HERE.parent / "textworld"
EXAMPLES = {
    "quickstart": Example(HERE / "build.py", CONFIG),
    "agent": Example(HERE / "build.py", HERE / "agent.yaml"),
    "asynchronous": Example(HERE / "build.py", HERE / "asynchronous.yaml"),
    "chain_sums": Example(SUMS / "build_sums.py", SUMS / "config.yaml"),
    "hosted_agent": Example(HOSTED / "build_hosted.py", HOSTED / "config.yaml"),
    "key_chain": Example(KEYS / "build_keys.py", KEYS / "config.yaml"),
    "medical_choice": Example(CHOICE / "build_choice.py", CHOICE / "config.yaml"),
    "smollm2": Example(SMOLLM2 / "build_problems.py", SMOLLM2 / "config.yaml"),
    "smollm2_reasoned": Example(SMOLLM2 / "build_reasoned.py", SMOLLM2 / "reasoned.yaml"),
    "smollm2_search": Example(SMOLLM2 / "build_search.py", SMOLLM2 / "search.yaml"),
    "textworld": Example(TEXTWORLD / "build_textworld.py", TEXTWORLD / "config.yaml"),
}
OURS = ("run.py", "ledger.py", "stages.py", "keep_model.py")  # sources that do not affect the built files
CORES = 2  # a rank, or a replica, on each
MODEL_SEED = 0  # of the built files for which examples/quickstart/model is cold-started
RUN_FILES = (
    "checkpoints",
    "configs",
    "dumps",
    "metrics.jsonl",
    "serving",
    "steps.jsonl",
    "tensorboard",
    "trajectories",
    "report.html",
    "config.yaml",
)
console = Console()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--example", choices=EXAMPLES, default="quickstart")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--cold-start",
        action="store_true",
        help="train from a cold start of this seed, not from the example's model",
    )
    parser.add_argument("overrides", nargs="*", metavar="section.field=value")
    arguments = parser.parse_args()
    overrides = [f"run.seed={arguments.seed}", *arguments.overrides]
    example = EXAMPLES[arguments.example]
    try:
        if arguments.cold_start:
            overrides.append(f"model.path={load(example.config, overrides).cold_start.output}")
        return run(example, overrides)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2


def run(example: Example, overrides: list[str]) -> int:
    """Run every stage that is not done.

    Return the exit status of the first that fails. Raises ConfigError.
    """
    config = load(example.config, overrides)
    stages = plan(config, overrides, example)
    with ExitStack() as held:
        for home in sorted({stage.home for stage in stages}):  # in the same order in every process
            held.enter_context(alone(home))
        for number, stage in enumerate(stages, 1):
            console.rule(f"{number}/{len(stages)} {stage.name}", align="left")
            ledger = StageLedger(stage.home)
            if ledger.is_done(stage):
                console.print(f"done before, in {ledger.seconds(stage):.0f} s")
            elif status := perform(stage, ledger, config.run.folder):
                return status
        finish(config, {stage.name: StageLedger(stage.home).seconds(stage) for stage in stages})
    return 0


def plan(config: Config, overrides: list[str], example: Example = EXAMPLES["quickstart"]) -> list[Stage]:
    """Return the stages: build, cold-start unless model.path is another model, and train.

    A key covers everything on which the product depends, and the previous stage. Raises ConfigError.
    """
    assert config.data.train is not None and config.cold_start.output is not None
    if not config.run.evaluate_every:
        raise ConfigError("run.evaluate_every=0: the summary compares evaluations; choose 1 or more")
    folder, data, cold = config.run.folder, config.data.train.parent, config.cold_start.output
    builder, trainers = example.builder, CORES - (config.serving.replicas or 0)
    cold_started = config.model.path == cold
    seed = config.run.seed if cold_started else MODEL_SEED
    sources = {*HERE.glob("*.py"), *builder.parent.glob("*.py"), *builder.parent.glob("*.jsonl")}
    build_key = key(
        f"{seed}, {cold_started}",
        *(path.read_text(encoding="utf-8") for path in sorted(sources) if path.name not in OURS),
    )
    build: tuple[str, ...] = (sys.executable, str(builder), "--output", str(data), "--seed", str(seed))
    stage = partial(under_torchrun, example.config)
    if cold_started:
        # Data parallelism is faster for a model this small. Training then loads it with tensor parallelism.
        start = [*overrides, f"model.path={data / 'model'}", "parallel.tensor=1"]
        cold_key = key(build_key, part(config, "cold_start", "megatron"))
        middle = [stage("cold-start", start, cold / "config.json", cold_key, cold.parent)]
    else:
        build, cold_key, middle = (*build, "--tokens", "0"), build_key, []  # demonstrations are not needed
    train_key = key(cold_key, config.dump())
    return [
        Stage("build", build, data / "manifest.json", build_key, data.parent),
        *middle,
        stage("train", overrides, folder / "metrics.jsonl", train_key, folder, trainers),
    ]


def under_torchrun(
    file: Path, name: str, overrides: list[str], product: Path, key: str, home: Path, count: int = CORES
) -> Stage:
    """Return a stage that runs the command `name` of megatron_stppo under torchrun, with `count` ranks."""
    ranks = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}")
    line = (sys.executable, *ranks, "-m", "megatron_stppo", name, str(file), *overrides)
    return Stage(
        name, line, product, key, home, check=lambda: checks.check(load(file, overrides), count, name)
    )


def part(config: Config, *sections: str) -> str:
    return json.dumps(config.model_dump(mode="json", include=set(sections)), sort_keys=True)


def key(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def perform(stage: Stage, ledger: StageLedger, folder: Path) -> int:
    """Run the stage and return its exit status. A failure prints its last lines. Raises ConfigError."""
    if stage.name == "cold-start" and stage.product.parent.exists():
        console.print(f"{stage.product.parent} is removed: it was made with other settings")
        shutil.rmtree(stage.product.parent)
    if stage.check is not None:
        stage.check()
    command = stage.command
    if stage.name == "train":
        command = prepare_training(command, ledger.was_begun(stage), folder)
    log, started = folder / "logs" / f"{stage.name}.log", time.monotonic()
    ledger.record(stage, 0.0, done=False)
    (note := folder / "exit.json").unlink(missing_ok=True)
    status = forward(command, log, os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"})
    ledger.record(stage, time.monotonic() - started, done=status == 0)
    if status:
        if note.exists():  # torchrun replaces the code of a training by 1
            status = json.loads(note.read_text(encoding="utf-8"))["code"] or status
        console.rule(f"{stage.name} ended with exit code {status}; the end of {log}:", style="red")
        print("\n".join(last_lines(log.read_text(errors="replace", encoding="utf-8"))), file=sys.stderr)
    return status


def last_lines(text: str, number: int = 15) -> list[str]:
    """Return the last lines that the ranks printed, without torchrun's report of 60 lines after them."""
    lines = text.splitlines()
    report = next((i for i, line in enumerate(lines) if "torch/distributed/elastic" in line), len(lines))
    return lines[max(0, report - number) : report] or lines[-number:]


def prepare_training(command: tuple[str, ...], was_begun: bool, folder: Path) -> tuple[str, ...]:
    """Return the command, with --resume after an interrupted attempt; else remove files of other settings."""
    checkpoints = folder / "checkpoints"
    if was_begun and checkpoints.is_dir() and any(checkpoints.iterdir()):
        return (*command, "--resume")
    for name in RUN_FILES:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    return command


def finish(config: Config, seconds: Mapping[str, float]) -> None:
    """Write summary.json and report.html, and print the table. seconds: {stage: its time}."""
    folder = config.run.folder
    evaluated = [row for row in read_rows(folder / "metrics.jsonl") if "evaluate/exact_match" in row]
    before, after = evaluated[0], evaluated[-1]
    installed = Path(sys.prefix) / "install-seconds"  # written by the Makefile
    summary = {
        "exact_match_before": before["evaluate/exact_match"],
        "exact_match_after": after["evaluate/exact_match"],
        "seed": config.run.seed,
        "iterations": config.run.iterations,
        "episodes": after["evaluate/episodes"],
        "seconds": round(sum(seconds.values()), 1),
        "stage_seconds": {name: round(of, 1) for name, of in seconds.items()},
        "install_seconds": float(installed.read_text(encoding="utf-8")) if installed.exists() else None,
        "before": held_out(before),
        "after": held_out(after),
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    page.draw_at_the_end(folder)  # again, with the summary
    show(summary, folder)


def held_out(row: Mapping[str, float]) -> dict[str, float]:
    """Return the numbers of an evaluation, from the row of the iteration before it."""
    return {name: value for name, value in row.items() if name.startswith("evaluate/")}


def show(summary: dict[str, Any], folder: Path) -> None:
    table = Table(title=f"Held-out tasks, seed {summary['seed']}", title_justify="left")
    for column in ("", "before", "after"):
        table.add_column(column, justify="right" if column else "left")
    before, after = summary["before"], summary["after"]
    for name, value in before.items():
        table.add_row(name.removeprefix("evaluate/").replace("_", " "), f"{value:.4g}", f"{after[name]:.4g}")
    console.print(table)
    stages = ", ".join(f"{name} {seconds:.0f}" for name, seconds in summary["stage_seconds"].items())
    console.print(f"{summary['seconds']:.0f} s in total: {stages}")
    console.print(
        f"Results: {folder}/{page.FILE}, or: tensorboard --logdir {folder}/tensorboard",
        soft_wrap=True,
    )


if __name__ == "__main__":
    drop_unwritable("stdout", "stderr")
    sys.exit(main())
