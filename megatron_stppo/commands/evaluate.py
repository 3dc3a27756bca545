"""Evaluate a checkpoint, or the policy during training, on held-out tasks."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_stppo.checkpoint import saving as checkpoints
from megatron_stppo.config import Config
from megatron_stppo.data import tasks
from megatron_stppo.describe import outcomes
from megatron_stppo.rollout.collect import Progress
from megatron_stppo.rollout.failures import warn
from megatron_stppo.telemetry.console import say, timed
from megatron_stppo.telemetry.metrics import counting
from megatron_stppo.telemetry.trajectory_files import new_folder
from megatron_stppo.telemetry.trajectory_log import TrajectoryLog
from megatron_stppo.types import Task
from megatron_stppo.worker import Worker, assemble, rollout_settings

HELD_OUT_SEED = 1_000_000_007  # the same tasks and random seeds in every iteration


def evaluate(config: Config, checkpoint: str | None = None, output: Path | None = None) -> None:
    """Evaluate model.path, or the checkpoint "step_N" or "latest", on data.evaluate, and print a table.

    Writes the numbers (result.json) and the episodes (trajectories/) to a new folder of the run:
    evaluate/step_N or evaluate/model, or step_N-2 and so on if it exists. `output`: another JSON file for the
    numbers. Raises ConfigError.
    """
    worker = assemble(config, training=False)
    rank, iteration = worker.learner.mesh.rank, 0
    if checkpoint is not None:
        folder, step = config.run.folder / "checkpoints", checkpoints.step_of(checkpoint)
        state = checkpoints.load_weights(folder, "actor", worker.learner.policy, step)
        iteration = state["iteration"]
        say(f"weights of {folder / f'step_{iteration}'}", rank == 0)
    with timed("first reshard", rank == 0):
        worker.publish(version=iteration)
    folder = config.run.folder / "evaluate"
    if rank == 0:
        folder = new_folder(folder, "model" if checkpoint is None else f"step_{iteration}")
    log = TrajectoryLog(folder, rank, worker.engine.tokenizer)
    with counting("episodes", rank == 0) as show:
        row = held_out(worker, log, iteration, show)
    if rank == 0:
        table = Table("held out", "value", title=f"{config.run.name}, iteration {iteration}")
        for name, value in row.items():
            table.add_row(name, f"{value:.3f}")
        Console().print(table)
        files = [folder / "result.json", *([output] if output is not None else [])]
        for path in files:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(row, indent=1))
        say(f"done; the numbers are {files[-1]}, the episodes are in {folder}")
    worker.close()


def sample(given: Sequence[Task], count: int | None) -> Sequence[Task]:
    """Return `count` random tasks, always the same, in file order: files are often sorted by data set."""
    if count is None or count >= len(given):
        return given
    chosen = sorted(random.Random(HELD_OUT_SEED).sample(range(len(given)), count))
    return [given[i] for i in chosen]


def held_out(
    worker: Worker, log: TrajectoryLog | None = None, iteration: int = 0, progress: Progress | None = None
) -> dict[str, Any]:
    """Return evaluate/* of the engine's weights. Collective. Equal on all ranks, except for the times."""
    config = worker.learner.config
    assert config.data.evaluate is not None, "validation/checks.py requires it"
    chosen = sample(tasks.read(config.data.evaluate), config.evaluate.tasks)
    settings = rollout_settings(config, config.evaluate.temperature)
    started = time.perf_counter()
    played = worker.play(chosen, config.evaluate.samples, settings, HELD_OUT_SEED, progress)
    seconds = time.perf_counter() - started
    every = played.every
    warn("evaluation", every, worker.learner.mesh.rank)
    if log is not None:
        log.write(iteration, played.own)
    counted = outcomes(every)
    return {
        "evaluate/exact_match": counted["ok"] / max(1, len(every) - counted["error"] - counted["timeout"]),
        "evaluate/called_tool": statistics.mean(t.tool_calls > 0 for t in every),
        "evaluate/turns": statistics.mean(len(t.turns) for t in every),
        "evaluate/failed": counted["error"] + counted["timeout"],
        "evaluate/episodes": len(every),
        "evaluate/tokens_per_second": sum(turn.tokens for t in every for turn in t.turns) / seconds,
    }
