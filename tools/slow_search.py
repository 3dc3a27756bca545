"""The search environment with a retriever that is sometimes slow, to measure the cost of a long tail.

    PYTHONPATH=tools megatron-stppo train CONFIG.yaml environment.kind=slow_search:factory

The seconds of a search are log-normal: half of the searches take 0.2 s or less, and one in 100 takes more
than 4 s. The seconds depend only on the seed of the episode and the number of the turn, so
check_asynchronous_plan.py can compute them. Turns without a search take no time.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable

from megatron_stppo.base.types import Message, Task
from megatron_stppo.config import EnvironmentConfig
from megatron_stppo.environments import search
from megatron_stppo.environments.base import Environment, StepResult

KIND = "slow_search:factory"  # environment.kind
MEDIAN, P99 = 0.2, 4.0  # seconds
SIGMA = math.log(P99 / MEDIAN) / 2.3263478740408408  # 99 % of a normal distribution lies below that


def seconds(seed: int, turn: int) -> float:
    """Return the seconds of a search. seed: of the environment's reset; turn: from 1."""
    return MEDIAN * math.exp(SIGMA * random.Random(f"{seed}/{turn}").gauss(0.0, 1.0))


class SlowSearch:
    """An episode of the search environment, with slow searches."""

    stop_strings = search.STOP_STRINGS

    def __init__(self, inner: Environment) -> None:
        self._inner, self._seed, self._turn = inner, 0, 0

    async def reset(self, task: Task, seed: int) -> list[Message]:
        self._seed = seed
        return await self._inner.reset(task, seed)

    async def step(self, action: str) -> StepResult:
        self._turn += 1
        result = await self._inner.step(action)
        if result.tool_calls:
            await asyncio.sleep(seconds(self._seed, self._turn))
        return result

    async def close(self) -> None:
        await self._inner.close()


def factory(config: EnvironmentConfig) -> Callable[[], Environment]:
    """Return a function that makes an environment per episode. Raises ConfigError as `search.factory`."""
    make = search.factory(config)
    return lambda: SlowSearch(make())
