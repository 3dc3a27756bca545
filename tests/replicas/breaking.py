"""The searching environment, which breaks: after some episodes all others of the process fail.

environment.kind=tests.replicas.breaking:factory. Variables: TRAINED and EVALUATED, how many episodes of tasks
of data.train and of data.evaluate succeed; without them all do. Those of data.evaluate have the data_source
"held".
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable

from megatron_stppo.base.types import Message, Task
from megatron_stppo.config import EnvironmentConfig
from megatron_stppo.environments.base import StepResult
from tests.training.loop import searching

BEGUN = Counter[str]()


class Breaking:
    stop_strings: tuple[str, ...] = ()

    def __init__(self, environment: searching.Searching) -> None:
        self._environment, self._breaks = environment, False

    async def reset(self, task: Task, seed: int) -> list[Message]:
        kind = "EVALUATED" if task.data_source == "held" else "TRAINED"
        BEGUN[kind] += 1
        self._breaks = BEGUN[kind] > int(os.environ.get(kind, "1000000"))
        return await self._environment.reset(task, seed)

    async def step(self, action: str) -> StepResult:
        if self._breaks:
            raise RuntimeError("the tool is broken")
        return await self._environment.step(action)

    async def close(self) -> None:
        await self._environment.close()


def factory(config: EnvironmentConfig) -> Callable[[], Breaking]:
    make = searching.factory(config)
    return lambda: Breaking(make())
