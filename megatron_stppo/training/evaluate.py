"""The command `evaluate`: measure a checkpoint on held-out tasks."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_stppo.checkpoint import loading as checkpoints
from megatron_stppo.cluster.launch import process
from megatron_stppo.config import Config
from megatron_stppo.observe.console import say, timed
from megatron_stppo.observe.metrics import counting
from megatron_stppo.observe.run_files import new_folder
from megatron_stppo.observe.trajectory_log import TrajectoryLog
from megatron_stppo.rollout.episodes.playable import playable
from megatron_stppo.training.colocated import assemble
from megatron_stppo.training.held_out import held_out


def evaluate(config: Config, checkpoint: str | None = None, output: Path | None = None) -> None:
    """Evaluate model.path, or the checkpoint "step_N" or "latest", on data.evaluate, and print a table.

    Writes the numbers (result.json, which names model and checkpoint) and the episodes (trajectories/) to a
    new folder of the run: evaluate/step_N or evaluate/model, or step_N-2 and so on if it exists. `output`:
    another JSON file for the numbers. Raises ConfigError.
    """
    rank, iteration, weights = process.rank(), 0, None
    held = playable(config, "evaluate", shown=rank == 0)
    used = config if checkpoint is None else config.of_checkpoint()
    worker = assemble(used, training=False, draws=False)
    if checkpoint is not None:
        folder, step = config.run.folder / "checkpoints", checkpoints.step_of(checkpoint)
        state = checkpoints.load_weights(folder, "actor", worker.learner.policy, step)
        iteration = state["iteration"]
        weights = folder / f"step_{iteration}"
        say(f"weights of {weights}", rank == 0)
    with timed("first reshard", rank == 0):
        worker.publish(version=iteration)
    folder = config.run.folder / "evaluate"
    if rank == 0:
        folder = new_folder(folder, "model" if checkpoint is None else f"step_{iteration}")
    log = TrajectoryLog(folder, rank, worker.tokenizer)
    with counting("episodes", rank == 0) as show:
        row = held_out(worker, held, log, iteration, show)
    if rank == 0:
        table = Table("held out", "value", title=f"{config.run.name}, iteration {iteration}")
        for name, value in row.items():
            table.add_row(name, f"{value:.3f}")
        Console().print(table)
        of = {"model": str(config.model.path.absolute()), "checkpoint": weights and str(weights.absolute())}
        files = [folder / "result.json", *([output] if output is not None else [])]
        for path in files:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(of | row, indent=1), encoding="utf-8")
        say(f"done; the numbers are {files[-1]}, the episodes are in {folder}")
    worker.close()
