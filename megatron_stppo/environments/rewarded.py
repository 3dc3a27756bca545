"""Another reward for an environment: `environment.reward: MODULE:FUNCTION`.

The function gets (task, turns, result): the Task; the (action, observation) texts of the episode's turns, in
order; and the StepResult of the last step, with the environment's own reward, outcome and extracted answer
(`detail`). It returns the reward of the episode, or a mapping with "reward" and numbers for
StepResult.metrics. It may be a coroutine function.

Example: def brief(task, turns, result): return result.reward - 0.001 * sum(len(a) for a, _ in turns)
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron_stppo.base.types import FAILED, Message, Task
from megatron_stppo.config import ConfigError
from megatron_stppo.environments import contract
from megatron_stppo.environments.base import Environment, Request, StepResult

Turns = list[tuple[str, str]]  # (action, observation)
RewardFunction = Callable[[Task, Turns, StepResult], Any]


class Rewarded:
    """An environment whose reward comes from a function. The function is called once, after the last step.

    It is not called for an episode that failed (error, timeout), or that the program ended because the
    context was full; these have the reward 0. An exception of the function, or a value that is not a reward,
    is the outcome `error` of its episode; after ToolAway the function is called again.
    """

    def __init__(self, environment: Environment, function: RewardFunction, where: str) -> None:
        """where: the field and the function, for messages. Example: "environment.reward=rewards:brief"."""
        self._environment, self._function, self._where = environment, function, where
        self._task: Task | None = None
        self._turns: Turns = []
        self._last: StepResult | None = None  # the result that is rewarded

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return contract.stop_strings(self._environment)

    async def reset(self, task: Task, seed: int) -> list[Message]:
        self._task, self._turns, self._last = task, [], None
        messages = await contract.reset(self._environment, task, seed)
        if isinstance(messages, Request):
            raise contract.NotAnEnvironment(
                f"{self._where}: an agent returns the reward itself; remove environment.reward"
            )
        return list(messages)

    async def step(self, action: str) -> StepResult:
        if self._last is None:  # otherwise the call is repeated, because the function raised ToolAway
            result = await contract.step(self._environment, action)
            self._turns.append((action, result.observation))
            if not result.done or result.outcome in FAILED:
                return replace(result, reward=0.0)
            self._last = result
        assert self._task is not None, "step before reset"
        value = self._function(self._task, list(self._turns), self._last)
        reward, metrics = contract.scored(self._where, await value if inspect.isawaitable(value) else value)
        return replace(self._last, reward=reward, metrics={**self._last.metrics, **metrics})

    async def close(self) -> None:
        await contract.close(self._environment)


def check_signature(function: object, where: str) -> RewardFunction:
    """Return the function. Raises ConfigError unless it can be called with (task, turns, result)."""
    remedy = "write `def reward(task, turns, result) -> float`"
    if not callable(function):
        raise ConfigError(f"{where}: is not a function; {remedy}")
    try:
        inspect.signature(function).bind(None, None, None)
    except TypeError as error:
        raise ConfigError(
            f"{where}: cannot be called with (task, turns, result): {error}; {remedy}"
        ) from None
    except ValueError:  # a builtin without a signature
        pass
    return function
