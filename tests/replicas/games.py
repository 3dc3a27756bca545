"""The game of tests/rollout with tools that take a random time. The times are not seeded: no two runs have
the same. environment.kind=tests.replicas.games:factory"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from megatron_stppo.config import EnvironmentConfig
from megatron_stppo.environments.base import StepResult
from tests.rollout.vllm.tiny import Game


class Dice(Game):
    async def step(self, action: str) -> StepResult:
        await asyncio.sleep(random.SystemRandom().uniform(0, 0.02))
        return await super().step(action)


def factory(config: EnvironmentConfig) -> Callable[[], Dice]:
    return Dice
