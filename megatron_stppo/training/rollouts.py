"""Where the trajectories come from: the interface that the training loop uses.

colocated.Worker plays them on the ranks of the trainer; replicas.trainer.served.Served has replicas for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from megatron_stppo.base.types import Task
from megatron_stppo.config import Config, RunConfig
from megatron_stppo.data.exchange import Played
from megatron_stppo.model.learner import Learner
from megatron_stppo.model.offload import Phase
from megatron_stppo.rollout.episodes.collect import Progress, RolloutSettings
from megatron_stppo.rollout.episodes.episode import Limits


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
