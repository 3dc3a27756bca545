"""Where the trajectories come from: the interface that the training loop uses, and what it evaluates with it.

colocated.Worker plays them on the ranks of the trainer; replicas.trainer.served.Served has replicas for it.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from megatron_stppo.base.types import FAILED, Task
from megatron_stppo.config import Config, RunConfig
from megatron_stppo.data.exchange import Played
from megatron_stppo.model.learner import Learner
from megatron_stppo.model.offload import Phase
from megatron_stppo.observe.describe import environment_metrics, outcomes, standard_error
from megatron_stppo.observe.trajectory_log import TrajectoryLog
from megatron_stppo.rollout.episodes.collect import Progress, RolloutSettings
from megatron_stppo.rollout.episodes.episode import Limits
from megatron_stppo.rollout.episodes.failures import warn
from megatron_stppo.rollout.episodes.fitting import SEED, FittingTasks, fitting_tasks


class Rollouts(Protocol):
    """All methods are collective over the trainer's ranks."""

    learner: Learner

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase: ...

    def publish(self, version: int) -> None:
        """Serve the policy's weights as `version`. If it is served already, they must be unchanged."""

    def draw(self, iteration: int) -> Played:
        """Return the trajectories that iteration `iteration` trains on."""

    def play(
        self,
        tasks: Sequence[Task],
        samples: int,
        settings: RolloutSettings,
        seed: int,
        progress: Progress | None = None,
    ) -> Played:
        """Play `samples` episodes of each task with the published version, and return their trajectories.

        Raises Abandoned soon after any rank has received notice.
        """

    def load_for(self, phase: Phase) -> None:
        """Load what the phase needs into the device's memory."""

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the rollouts, JSON-serialisable."""

    def episodes(self) -> bytes:
        """Return the episodes that a checkpoint keeps besides the state, b"" if there are none."""

    def restore(self, state: Mapping[str, Any], episodes: Callable[[], bytes]) -> None:
        """Continue from a checkpoint's state. Call it before the first `publish`.

        episodes: reads those of the checkpoint. It is called on the first rank at most.
        """

    def measure(self) -> dict[str, Any]:
        """Return metrics since the last call, equal on all ranks."""

    def close(self) -> None:
        """End the engine or the replicas, and the process groups."""


def rollout_settings(config: Config, temperature: float | None = None) -> RolloutSettings:
    """Return the configured rollout settings.

    temperature: for evaluation, replaces the configured temperature; top_p is then 1.
    """
    r, e = config.rollout, config.environment
    return RolloutSettings(
        limits=Limits.of(config),
        temperature=r.temperature if temperature is None else temperature,
        top_p=r.top_p if temperature is None else 1.0,
        overlap_tools=r.overlap_tools,
        concurrency=e.concurrency,
        deadline=e.deadline,
        tool_wait=e.tool_wait,
    )


def seed_of(run: RunConfig, iteration: int) -> int:
    """Return the random seed for the rollouts of `iteration`."""
    return run.seed * 1_000_003 + iteration


def held_out_tasks(config: Config, *, shown: bool) -> FittingTasks:
    """Return the tasks that evaluations play. shown: as for `fitting_tasks`."""
    return fitting_tasks(config, "evaluate", shown=shown)


def evaluate_tasks(
    rollouts: Rollouts,
    held_out: FittingTasks,
    log: TrajectoryLog | None = None,
    iteration: int = 0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Return evaluate/* of the published weights on held-out tasks. Random seeds are the same every time.

    Collective. Equal on all ranks, except for the times.
    """
    config = rollouts.learner.config
    settings = rollout_settings(config, config.evaluate.temperature)
    started = time.perf_counter()
    with log.failing(iteration) if log is not None else nullcontext():
        played = rollouts.play(held_out.tasks, config.evaluate.samples, settings, SEED, progress)
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
        "evaluate/overlong_prompts": held_out.overlong + len({t.group for t in long}),
        "evaluate/episodes": len(every),
        "evaluate/tokens_per_second": sum(turn.tokens for t in played.every for turn in t.turns) / seconds,
        **{f"evaluate/{name}": value for name, value in environment_metrics(every).items()},
    }
