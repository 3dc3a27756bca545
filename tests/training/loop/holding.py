"""The environment of searching.py, whose evaluations wait while the working directory has a file `hold`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from megatron_stppo.base.types import Message, Task
from megatron_stppo.config import EnvironmentConfig
from megatron_stppo.environments import search
from tests.training.loop.searching import Searching


class Holding(Searching):
    async def reset(self, task: Task, seed: int) -> list[Message]:
        if task.split == "evaluate" and Path("hold").exists():
            Path("waits").touch()
            await asyncio.sleep(600)
        return await super().reset(task, seed)


def factory(config: EnvironmentConfig) -> Callable[[], Holding]:
    make = search.factory(config)
    return lambda: Holding(make())
