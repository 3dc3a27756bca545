"""The command `rollout`: play data.train and write the trajectories, without training."""

from __future__ import annotations

from pathlib import Path

from megatron_stppo.checkpoint import loading
from megatron_stppo.cluster.launch import process
from megatron_stppo.config import Config
from megatron_stppo.observe.console import RowLines, say, timed
from megatron_stppo.observe.describe import describe_groups, describe_rollouts
from megatron_stppo.observe.metrics import Metrics, progress
from megatron_stppo.observe.trajectory_log import TrajectoryLog
from megatron_stppo.rollout.episodes.failures import warn
from megatron_stppo.training.colocated import assemble
from megatron_stppo.validation import attempts


def play(config: Config, source: Path | None = None, start: str = "latest") -> None:
    """Play the iterations up to run.iterations, with model.path or with a checkpoint of another run.

    `source`: that run's folder. `start`: its checkpoint, "step_N" or "latest". Tasks, seeds and sampling are
    those of a training run, so that the first iteration is the one that training would play next. Builds
    neither optimizer nor critic. Collective. Raises ConfigError.
    """
    run, version = config.run, 0
    worker = assemble(config if source is None else config.of_checkpoint(), training=False)
    if source is not None:
        folder, step = source / "checkpoints", loading.step_of(start)
        state = loading.load_weights(folder, "actor", worker.learner.policy, step)
        version = int(state["iteration"])
        if "cursor" in state:  # a converted checkpoint has no cursor
            worker.restore(state)
    rank = worker.learner.mesh.rank
    process.log_to(run.folder, rank)
    attempts.record(config, rank)
    metrics = Metrics(run.folder, rank, reporters=[RowLines("rollouts", run.iterations)] if rank == 0 else [])
    log = TrajectoryLog(run.folder, rank, worker.tokenizer)
    with timed("first reshard", rank == 0):
        worker.publish(version)
    for iteration in progress(range(version, run.iterations), "rollouts", rank == 0, every=None):
        with metrics.phase("rollout"), log.failing(iteration + 1):
            played = worker.draw(iteration)
        written = log.write(iteration + 1, played.own)
        warn(f"iteration {iteration + 1}", played.with_dropped, rank)
        of_groups = describe_groups(played.every, played.dropped)
        metrics.log(iteration + 1, describe_rollouts(played.every, version) | of_groups | written)
    metrics.close()
    say(f"done; the episodes are in {run.folder / 'trajectories'}", rank == 0)
    worker.close()
