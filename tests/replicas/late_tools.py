"""The searching environment with tools that take a random time; a fault can be planted in a replica.

environment.kind=tests.replicas.late_tools:factory. Variables: LATE, the mean seconds of an answer (the times
are not seeded: no two runs have the same); HOLD, the path of a file, while which exists no tool answers;
PLANT: if set, replicas keep stale blocks, for the audit to find.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path

from megatron_stppo.base.types import Message, Task
from megatron_stppo.config import EnvironmentConfig
from megatron_stppo.environments.base import StepResult
from tests.training.loop import searching

LATE, PLANT = float(os.environ.get("LATE", "0")), os.environ.get("PLANT", "")
HOLD = Path(os.environ.get("HOLD", "/nowhere"))


class Late:
    stop_strings: tuple[str, ...] = ()

    def __init__(self, environment: searching.Searching) -> None:
        self._environment, self._clock = environment, random.SystemRandom()

    async def reset(self, task: Task, seed: int) -> list[Message]:
        return await self._environment.reset(task, seed)

    async def step(self, action: str) -> StepResult:
        await asyncio.sleep(self._clock.expovariate(1 / LATE) if LATE else 0)
        while HOLD.exists():
            await asyncio.sleep(0.05)
        return await self._environment.step(action)

    async def close(self) -> None:
        await self._environment.close()


def factory(config: EnvironmentConfig) -> Callable[[], Late]:
    if PLANT and "serve" in sys.argv and "vllm" in sys.modules:  # once: a replica makes it after its imports
        _keep_stale_blocks()
    make = searching.factory(config)
    return lambda: Late(make())


def coarse(task: Task, turns: object, result: StepResult) -> float:
    """environment.reward=tests.replicas.late_tools:coarse: rewards of 0 or 1, which are often equal."""
    return float(result.reward > 0.4)


def _keep_stale_blocks() -> None:
    """New weights do not empty the key-value cache."""
    from megatron_stppo.rollout.vllm.engine import Engine  # imports vLLM, which the trainer does not need

    refresh = Engine.refresh

    def stale(engine: Engine, *, recompute: bool = False) -> int:
        scheduler = engine._core.engine_core.scheduler
        kept, scheduler.reset_prefix_cache = scheduler.reset_prefix_cache, lambda *_, **__: True
        try:
            return refresh(engine, recompute=recompute)
        finally:
            scheduler.reset_prefix_cache = kept

    Engine.refresh = stale  # type: ignore[method-assign]
