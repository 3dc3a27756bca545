"""Lower bounds of the time of an iteration: FLOP and bytes divided by the GPU's peak rates.

Every trajectory has the greatest length that is allowed. A real run takes longer than these bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_stppo.config import Config
from megatron_stppo.parallel.layout import Layout
from megatron_stppo.plan.engine import EngineUse
from megatron_stppo.plan.hardware import Gpu
from megatron_stppo.plan.phases import StageUse
from megatron_stppo.plan.work import Work


@dataclass(frozen=True)
class Bounds:
    """Lower bounds in seconds, and the work of an iteration."""

    rollout: float
    score: float
    update: float
    reshard: float
    tokens: int  # of all trajectories
    flop_per_gpu: float  # in score and update, on the stage with most FLOP

    @property
    def seconds(self) -> float:
        return self.rollout + self.score + self.update + self.reshard

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def bounds(
    config: Config,
    layout: Layout,
    stages: Sequence[StageUse],
    engine: EngineUse,
    work: Work,
    microbatch_tokens: int,
    reshard_seconds: float,
    gpu: Gpu,
) -> Bounds:
    """Return the bounds.

    microbatch_tokens: tokens, on one rank, of the micro-batch whose FLOP were counted.
    """
    played = config.rollout.tasks_per_iteration * config.rollout.samples_per_task
    share = work.tokens / microbatch_tokens * config.update.minibatches  # a rank's work, in micro-batches
    bubble = 1 + (layout.pipeline - 1) / (layout.virtual * work.microbatches)
    scored, updated = microbatch_flop(config, stages)
    score, update = scored * share, updated * share * config.update.epochs
    whole = sum(one.served_flop for one in {s.stage: s for s in stages}.values())
    per_token = whole * layout.tensor / microbatch_tokens
    return Bounds(
        rollout=_rollout(config, layout, engine, work, per_token, gpu),
        score=score * bubble / gpu.flops,
        update=update * bubble / gpu.flops,
        reshard=reshard_seconds,
        tokens=played * work.longest,
        flop_per_gpu=score + update,
    )


def microbatch_flop(config: Config, stages: Sequence[StageUse]) -> tuple[int, int]:
    """Return the FLOP of a micro-batch on one GPU of the stage with most of them: (score, update)."""
    passes = {"actor": 2 if config.algorithm.correction == "gradient" else 1}
    scored = max(sum(one.models[role].score_flop for role in one.scored) for one in stages)
    updated = max(
        sum(use.update_flop * passes.get(role, 1) for role, use in one.models.items()) for one in stages
    )
    return scored, updated


def _rollout(
    config: Config, layout: Layout, engine: EngineUse, work: Work, flop_per_token: float, gpu: Gpu
) -> float:
    """Return the seconds of the rollout: the larger of the time to read memory and the time to compute.

    Every step reads all weights. Every token reads the keys and values before it, on average those of half a
    trajectory.
    """
    replicas = layout.world // config.engine_tensor
    played = config.rollout.tasks_per_iteration * config.rollout.samples_per_task / replicas
    room = max(1, engine.cached_tokens // work.longest)  # whole trajectories in the cache
    together = min(config.rollout.max_sequences, played, room)
    steps = played / together * work.action_tokens
    keys = played * work.action_tokens * work.longest / 2 * engine.cache_per_token
    read = (steps * engine.weights + keys) / gpu.memory_rate
    computed = played * work.longest * flop_per_token / config.engine_tensor / gpu.flops
    return max(read, computed)
