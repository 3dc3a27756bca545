"""Evaluation of the published weights on held-out tasks."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

from megatron_stppo.data import tasks
from megatron_stppo.describe import environment_metrics, outcomes
from megatron_stppo.rollout.collect import Progress
from megatron_stppo.rollout.failures import warn
from megatron_stppo.rollouts import Rollouts, rollout_settings
from megatron_stppo.telemetry.trajectory_log import TrajectoryLog
from megatron_stppo.types import Task

SEED = 1_000_000_007  # the same tasks and random seeds in every iteration


def sample(given: Sequence[Task], count: int | None) -> Sequence[Task]:
    """Return `count` random tasks, always the same, in file order: files are often sorted by data set."""
    if count is None or count >= len(given):
        return given
    chosen = sorted(random.Random(SEED).sample(range(len(given)), count))
    return [given[i] for i in chosen]


def held_out(
    rollouts: Rollouts, log: TrajectoryLog | None = None, iteration: int = 0, progress: Progress | None = None
) -> dict[str, Any]:
    """Return evaluate/* of the published weights. Collective. Equal on all ranks, except for the times."""
    config = rollouts.learner.config
    assert config.data.evaluate is not None, "validation/checks.py requires it"
    chosen = sample(tasks.read(config.data.evaluate), config.evaluate.tasks)
    settings = rollout_settings(config, config.evaluate.temperature)
    started = time.perf_counter()
    played = rollouts.play(chosen, config.evaluate.samples, settings, SEED, progress)
    seconds = time.perf_counter() - started
    every = [t for t in played.every if t.branch == 0]  # an episode counts once
    warn("evaluation", every, rollouts.learner.mesh.rank)
    if log is not None:
        log.write(iteration, played.own)
    counted = outcomes(every)
    return {
        "evaluate/exact_match": counted["ok"] / max(1, len(every) - counted["error"] - counted["timeout"]),
        "evaluate/called_tool": statistics.mean(t.tool_calls > 0 for t in every),
        "evaluate/turns": sum(len(t.turns) for t in played.every) / len(every),
        "evaluate/failed": counted["error"] + counted["timeout"],
        "evaluate/overlong_prompts": sum(t.overlong_prompt > 0 for t in every),
        "evaluate/episodes": len(every),
        "evaluate/tokens_per_second": sum(turn.tokens for t in played.every for turn in t.turns) / seconds,
        **{f"evaluate/{name}": value for name, value in environment_metrics(every).items()},
    }
