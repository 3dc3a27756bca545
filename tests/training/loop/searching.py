"""The search environment for a policy that cannot write tags.

Odd turns are searches, even turns are answers. The reward depends on the length of the answer, so that the
rewards of a batch vary. The exact matches of a random policy would not vary.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from megatron_stppo.base.types import Message, Task
from megatron_stppo.config import EnvironmentConfig
from megatron_stppo.environments import search
from megatron_stppo.environments.base import StepResult


class Searching:
    stop_strings: tuple[str, ...] = ()

    def __init__(self, environment: search.SearchEnvironment) -> None:
        self._environment, self._searched = environment, False

    async def reset(self, task: Task, seed: int) -> list[Message]:
        return await self._environment.reset(task, seed)

    async def step(self, action: str) -> StepResult:
        if self._searched:
            reward = len(action) % 8 / 8
            return StepResult("", reward, True, True, False, "ok" if reward > 0.4 else "wrong", action[-8:])
        result = await self._environment.step("<search>capital</search>")
        self._searched = True
        return result

    async def close(self) -> None:
        await self._environment.close()


def factory(config: EnvironmentConfig) -> Callable[[], Searching]:
    make = search.factory(config)
    return lambda: Searching(make())


def late(config: EnvironmentConfig) -> Callable[[], search.SearchEnvironment]:
    """Return the search environment. Opening it makes the folder `cold`, the output of a cold start."""
    assert config.retrieval.index is not None
    (Path(config.retrieval.index).parent / "cold").mkdir(exist_ok=True)
    return search.factory(config)


class Holding(Searching):
    """Its evaluations wait while the working directory has a file `hold`."""

    async def reset(self, task: Task, seed: int) -> list[Message]:
        if task.split == "evaluate" and Path("hold").exists():
            Path("waits").touch()
            await asyncio.sleep(600)
        return await super().reset(task, seed)


def holding(config: EnvironmentConfig) -> Callable[[], Holding]:
    make = search.factory(config)
    return lambda: Holding(make())
