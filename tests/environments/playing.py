"""An episode of an environment, without an engine."""

from __future__ import annotations

import asyncio

from megatron_stppo.base.types import Task
from megatron_stppo.environments.base import Environment, StepResult


def played(environment: Environment, task: Task, *actions: str) -> list[StepResult]:
    """Play until the episode is done or the actions are used up. Return the results."""

    async def episode() -> list[StepResult]:
        assert await environment.reset(task, seed=0) == list(task.prompt)
        results = list[StepResult]()
        for action in actions:
            results.append(await environment.step(action))
            if results[-1].done:
                break
        await environment.close()
        return results

    return asyncio.run(episode())
