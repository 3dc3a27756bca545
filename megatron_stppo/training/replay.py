"""The command `replay`: train again from what a run recorded, without an engine.

rollouts: read trajectories/, which every run writes, and compute score, advantage and update. On a CPU,
metrics and weights are bit for bit those of the run, unless the run rolled back.
batches: read the scored batches in dumps/, which contain log-probs and values, and compute advantage and
update.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_stppo.base.types import Batch, ScoredBatch
from megatron_stppo.checkpoint import loading
from megatron_stppo.cluster.launch import process
from megatron_stppo.config import Config, ConfigError
from megatron_stppo.config.file import read_yaml
from megatron_stppo.config.section import enforce
from megatron_stppo.data.packing import groups_of, to_batch
from megatron_stppo.model.learner import Learner, build_learner
from megatron_stppo.observe import run_files, trajectory_log
from megatron_stppo.observe.console import RowLines, say, timed
from megatron_stppo.observe.describe import describe_batch, describe_groups, describe_rollouts
from megatron_stppo.observe.metrics import Metrics, progress
from megatron_stppo.training.advantage import has_signal
from megatron_stppo.training.guard import dumps
from megatron_stppo.training.loop import Checkpoints
from megatron_stppo.training.stages import advantages, divided, score, update, with_behaviour
from megatron_stppo.training.update.own import Own
from megatron_stppo.validation import attempts, checks
from megatron_stppo.weights.sharding.hf_names import read_shape

Recorded = tuple[ScoredBatch, Tensor, dict[str, Any]]  # and group_N, and metrics of the rollouts


def replay(config: Config, records: str, run: Path, start: str | None = None) -> None:
    """Replay the recorded iterations of the folder `run` up to run.iterations. Collective.

    Starts from model.path, or from the run's checkpoint `start`, "step_N" or "latest".

    Writes metrics.jsonl, dumps and a checkpoint of the last iteration to the folder of `config`'s run.
    Raises ConfigError for records that are missing, damaged or do not fit the layout.
    """
    recorded, read = SOURCES[records]
    own, shape, mesh = Own.of(config), read_shape(config.model.path), process.start(config)
    rank, folder = mesh.rank, config.run.folder
    with timed("models", rank == 0):
        learner = build_learner(attempts.as_begun(config, run), shape, mesh, process.dtype(config))
    checkpoints = Checkpoints(config, learner, rollback=False)  # those are in the replayed run's folder
    first = checkpoints.continue_from(_load(learner, run, start)) if start else 0
    numbers = [n for n in recorded(run) if first < n <= config.run.iterations]
    if not numbers:
        raise ConfigError(
            f"RUN_DIR={run}: holds no {records} of iterations {first + 1} to {config.run.iterations}; choose "
            "another run, --start or run.iterations"
        )
    process.log_to(folder, rank)
    attempts.record(config, rank)
    name = f"replay of {records}"
    metrics = Metrics(folder, rank, reporters=[RowLines(name, config.run.iterations)])
    for number in progress(numbers, name, rank == 0, every=None):
        with metrics.phase("score"):
            learner.load_for("score")
            scored, group_N, row = read(learner, run, number)
        with metrics.phase("advantage"):
            batch = advantages(learner, scored, group_N, own.advantage)
        with metrics.phase("update"):
            learner.load_for("update")
            hold = not has_signal(batch, config.algorithm, group_N, own.advantage)
            of_update, _, updated = update(learner, batch, number - 1, hold, own.loss)
            row = of_update | describe_batch(updated) | row
            row |= checkpoints.guard.look(number, row, updated, group_N, hold)
        metrics.log(number, row)
    learner.load_for("checkpoint")
    checkpoints.save(numbers[-1])
    checkpoints.saver.finish()
    metrics.close()
    say(f"done; metrics and checkpoint are in {folder}", rank == 0)
    process.stop()


def _load(learner: Learner, run: Path, start: str) -> dict[str, Any]:
    """Load the checkpoint `start` into the models, and return the loop's state in it."""
    state = loading.load(run / "checkpoints", learner.trainers, loading.step_of(start))
    if state is None:
        raise ConfigError(f"--start={start}: {run} holds no checkpoint; omit --start")
    return state


def _rollouts(learner: Learner, run: Path, iteration: int) -> Recorded:
    played = trajectory_log.read(run, iteration, learner.shape.vocab)
    batch, every = to_batch(played), [t.summary for t in played]
    _check(learner, batch, run, iteration)
    row = describe_rollouts(every, iteration - 1) | describe_groups(every)
    return score(learner, divided(learner, batch, iteration - 1)), groups_of(every), row


def _batches(learner: Learner, run: Path, iteration: int) -> Recorded:
    batch, group_N = dumps.read(run, iteration, learner.mesh)
    _check(learner, batch, run, iteration)
    batch = replace(batch, epochs=divided(learner, batch, iteration - 1).epochs)
    reference = learner.config.model.reference_path
    recorded = (read_yaml(run / "config.yaml", "RUN_DIR").get("model") or {}).get("reference_path")
    if learner.config.needs_reference and recorded != (None if reference is None else str(reference)):
        raise ConfigError(
            f"model.reference_path={reference}: the batches have the log-probs of that run's reference, "
            f"{recorded}; give the same, or replay the run's rollouts"
        )
    for column, needed in (
        ("value_T", learner.config.needs_critic),
        ("value_R", learner.config.algorithm.gae_observations),
        ("reference_logprob_T", learner.config.needs_reference),
        ("routes_P", learner.config.algorithm.routing_replay != "off"),
    ):
        if needed and getattr(batch, column) is None:
            raise ConfigError(
                f"RUN_DIR={run}: the batch of iteration {iteration} has no {column}; set the section "
                "algorithm as in that run, or replay its rollouts"
            )
    if learner.config.old_logprob_source == "behaviour":  # also if the run had another old policy
        return with_behaviour(batch), group_N, {}
    engine_T, old_T = batch.rollout_logprob_T, batch.old_logprob_T
    if old_T is not None and len(old_T) and torch.equal(old_T, engine_T):
        raise ConfigError(
            f"algorithm.old_policy=score: RUN_DIR={run}: the old log-probs of iteration {iteration} are the "
            "engine's; set it to behaviour, or replay the run's rollouts"
        )
    return batch, group_N, {}


def _check(learner: Learner, batch: Batch, run: Path, iteration: int) -> None:
    enforce([checks.divisible(learner.config, learner.mesh.layout, int(batch.first_N.sum()))])
    largest = int(batch.tokens_P.max()) if len(batch.tokens_P) else 0  # all of this rank's episodes failed
    if largest >= learner.shape.vocab:
        raise ConfigError(
            f"model.path={learner.config.model.path}: has {learner.shape.vocab} tokens, but {run} contains "
            f"token {largest} in iteration {iteration}; give the model of that run"
        )


# {records: (the iterations of a run's folder that are recorded, the scored batch of one)}
SOURCES = {"rollouts": (run_files.recorded, _rollouts), "batches": (dumps.recorded, _batches)}
