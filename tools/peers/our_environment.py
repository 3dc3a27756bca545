"""The task as an environment of megatron_stppo: `turns` turns of any text, each answered with OBSERVATION."""

from __future__ import annotations

from collections.abc import Callable

from game import OBSERVATION, reward

from megatron_stppo.base.types import Message, Task
from megatron_stppo.config import EnvironmentConfig
from megatron_stppo.environments.base import StepResult


class House:
    """One episode of the task."""

    stop_strings: tuple[str, ...] = ()

    def __init__(self, turns: int) -> None:
        self._left, self._text = turns, ""

    async def reset(self, task: Task, seed: int) -> list[Message]:
        return list(task.prompt)

    async def step(self, action: str) -> StepResult:
        self._left, self._text = self._left - 1, self._text + action
        if self._left:
            return StepResult(OBSERVATION, 0.0, done=False, valid=True, tool_calls=1)
        won = reward(self._text)
        return StepResult("", won, True, True, False, "ok" if won else "wrong")

    async def close(self) -> None:
        pass


def factory(config: EnvironmentConfig) -> Callable[[], House]:
    """Return a function that makes an environment of `environment.max_turns` turns."""
    return lambda: House(config.max_turns)
