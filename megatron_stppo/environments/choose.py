"""The environment named by a run's configuration: one of the package, or one that the user wrote."""

import importlib
import inspect
import shutil
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from megatron_stppo.base import interfaces
from megatron_stppo.base.types import FAILED, Message, Task
from megatron_stppo.config import ConfigError, EnvironmentConfig, user_code
from megatron_stppo.config.user_code import FOUND
from megatron_stppo.environments import contract, search
from megatron_stppo.environments.base import Environment, Request, StepResult, ToolAway

AGENT = "agent"  # its environment needs the engine's process: agents/endpoint/opening.py
REMEDY = f"give search, {AGENT}, or MODULE:FACTORY, {FOUND}"
# of older runs: kinds, and the program of an agent
MOVED = {"reasoning_gym": "give gym_tasks:factory, whose module is in examples/reasoning_gym"}
OLD_COMMAND = "megatron_stppo.agents.packages.command"


def factory(config: EnvironmentConfig) -> Callable[[], Environment]:
    """Return a function that makes one environment per episode.

    Raises ConfigError if the environment, or the function that `environment.reward` names, cannot be imported
    or used. A ToolAway that the user's factory raises is passed on.
    Example: kind "guess:factory" calls factory(config) of the module guess; "search" calls search.factory.
    """
    if config.kind == AGENT:
        raise ConfigError(
            "environment.kind=agent: an agent needs a policy; play its episodes with `megatron-stppo rollout`"
        )
    make = search.factory(config) if config.kind == "search" else _own(config)
    if config.reward is None:
        return make
    where = f"environment.reward={config.reward}"
    function = check_signature(user_code.function(where, config.reward, config.modules), where)
    return lambda: Rewarded(make(), function, where)


def _own(config: EnvironmentConfig) -> Callable[[], Environment]:
    """Return what the user's factory returns."""
    where, (module, name) = f"environment.kind={config.kind}", _named(config)
    with user_code.one_line(where, REMEDY, ToolAway):
        own = getattr(importlib.import_module(module), name)
        make: Callable[[], Environment] | None = own(config) if callable(own) else None
    if not callable(make):
        raise ConfigError(
            f"{where}: its factory must take the section and return a function without arguments; {REMEDY}"
        )
    return make


def _named(config: EnvironmentConfig) -> tuple[str, str]:
    """Return the module and the name of the user's factory. Raises ConfigError, as `user_code.named`."""
    remedy = MOVED.get(config.kind, REMEDY)
    return user_code.named(f"environment.kind={config.kind}", config.kind, config.modules, "factory", remedy)


def check(config: EnvironmentConfig, resume: bool = False) -> None:
    """Raise ConfigError for an environment that cannot work, before torch and megatron are set up.

    For the search environment, check that the retriever is reachable and not empty. With `resume` it need not
    be reachable yet, because the run waits for it. For a user's module, check only that its file exists: the
    module may import torch, so it is not imported here.
    """
    if config.reward is not None:
        user_code.named(f"environment.reward={config.reward}", config.reward, config.modules, "reward")
    if config.kind == "search":
        with suppress(*((search.Unreachable,) if resume else ())):
            search.open_retriever(config)
    elif config.kind == AGENT:
        _check_agent(config)
    else:
        _named(config)


def _check_agent(config: EnvironmentConfig) -> None:
    listen_for_agents(config.agents_address).close()
    if config.agent is not None:
        user_code.named(f"environment.agent={config.agent}", config.agent, config.modules, "agent")
    elif OLD_COMMAND in (config.command or ()):
        raise ConfigError(f"environment.command: {OLD_COMMAND} is gone; give megatron_stppo.agents.command")
    elif config.command is not None and shutil.which(config.command[0]) is None:
        raise ConfigError(
            f"environment.command={config.command[0]}: no such program; give its path, or set PATH"
        )


def listen_for_agents(address: str) -> socket.socket:
    """Return a socket that listens at `environment.agents_address`. Raises ConfigError."""
    return interfaces.listen("environment.agents_address", address, "agents")


Turns = list[tuple[str, str]]  # (action, observation)
RewardFunction = Callable[[Task, Turns, StepResult], Any]


class Rewarded:
    """An environment whose reward comes from a function. The function is called once, after the last step.

    It is not called for an episode that failed (error, timeout), or that the program ended because the
    context was full; these have the reward 0. An exception of the function, or a value that is not a reward,
    is the outcome `error` of its episode; after ToolAway the function is called again.

    The function gets (task, turns, result): the Task; the (action, observation) texts of the episode's turns,
    in order; and the StepResult of the last step, with the environment's own reward, outcome and extracted
    answer (`detail`). It returns the reward of the episode, or a mapping with "reward" and numbers for
    StepResult.metrics. It may be a coroutine function.

    Example: def brief(task, turns, result): return result.reward - 0.001 * sum(len(a) for a, _ in turns)
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
