"""Evaluation of the published weights on held-out tasks."""

from __future__ import annotations

import statistics
import time
from contextlib import nullcontext
from typing import Any

from megatron_stppo.base.types import FAILED
from megatron_stppo.observe.describe import environment_metrics, outcomes, standard_error
from megatron_stppo.observe.trajectory_log import TrajectoryLog
from megatron_stppo.rollout.episodes.collect import Progress
from megatron_stppo.rollout.episodes.failures import warn
from megatron_stppo.rollout.episodes.playable import SEED, Playable
from megatron_stppo.training.rollouts import Rollouts, rollout_settings


def held_out(
    rollouts: Rollouts,
    given: Playable,
    log: TrajectoryLog | None = None,
    iteration: int = 0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Return evaluate/* of the published weights on the given tasks. Random seeds are the same every time.

    Collective. Equal on all ranks, except for the times.
    """
    config = rollouts.learner.config
    settings = rollout_settings(config, config.evaluate.temperature)
    started = time.perf_counter()
    with log.failing(iteration) if log is not None else nullcontext():
        played = rollouts.play(given.tasks, config.evaluate.samples, settings, SEED, progress)
    seconds = time.perf_counter() - started
    every = [t for t in played.every if t.branch == 0]  # an episode counts once
    warn("evaluation", every, rollouts.learner.mesh.rank)
    if log is not None:
        log.write(iteration, played.own)
    long = [t for t in every if t.overlong_prompt]  # the environment's prompt; that of the row was not
    every = [t for t in every if not t.overlong_prompt]
    counted = outcomes(every)
    usable = [t for t in every if t.outcome not in FAILED]
    return {
        "evaluate/reward": statistics.fmean([t.reward for t in usable] or [0.0]),
        "evaluate/exact_match": counted["ok"] / max(1, len(usable)),
        "evaluate/standard_error": standard_error(
            [float(t.outcome == "ok") for t in usable], [t.group for t in usable]
        ),
        "evaluate/called_tool": statistics.mean(t.tool_calls > 0 for t in every),
        "evaluate/turns": sum(len(t.turns) for t in played.every) / len(every),
        "evaluate/failed": counted["error"] + counted["timeout"],
        "evaluate/overlong_prompts": given.overlong + len({t.group for t in long}),
        "evaluate/episodes": len(every),
        "evaluate/tokens_per_second": sum(turn.tokens for t in played.every for turn in t.turns) / seconds,
        **{f"evaluate/{name}": value for name, value in environment_metrics(every).items()},
    }
