"""Calls of a user's environment, with checks of the types of what it returns.

A return value of the wrong type would fail far from its cause, or not at all, and in the same way in every
attempt. It is therefore a ConfigError, which ends the run with exit code 2. Exceptions of an environment are
passed on: they become the outcome of its episode. A reward that is not finite is also passed on: the update
refuses it.
"""

from __future__ import annotations

import inspect
import math
import numbers
import re
from collections.abc import Awaitable, Mapping
from dataclasses import replace
from typing import Any, get_args

from megatron_stppo.config import ConfigError
from megatron_stppo.data.values import plain
from megatron_stppo.environments.base import (
    AnyEnvironment,
    Completion,
    CompletionEnvironment,
    Request,
    StepResult,
)
from megatron_stppo.types import Message, Outcome, Task

OUTCOMES: tuple[str, ...] = get_args(Outcome)
MAX_SHOWN = 60  # characters of a wrong value in a message
MAX_METRICS = 32  # of an episode's step
METRIC = re.compile(r"[A-Za-z0-9_./-]{1,64}")  # names that metrics.jsonl, TensorBoard and Prometheus can show


async def reset(environment: AnyEnvironment, task: Task, seed: int) -> tuple[Message, ...] | Request:
    """Return the messages of `environment.reset`, or the first request of a CompletionEnvironment.

    Raises ConfigError unless they are Messages with text.
    """
    where = f"{type(environment).__name__}.reset()"
    messages = await _awaitable(environment, "reset", task, seed)
    if isinstance(messages, Request):
        return messages
    if not isinstance(messages, list | tuple) or not messages:
        raise _wrong(where, "returned", messages, "return a list of at least one types.Message")
    checked = []
    for position, message in enumerate(messages):
        at = f"{where}[{position}]"
        if not isinstance(message, Message):
            raise _wrong(at, "returned", message, 'return a types.Message, such as Message("user", "..")')
        _check_text(at, "role", message.role)
        _check_text(at, "content", message.content)
        checked.append(replace(message, extra=plain(message.extra, at, "extra")))  # ranks exchange it
    return tuple(checked)


def stop_strings(environment: AnyEnvironment) -> tuple[str, ...]:
    """Return the strings that end a turn.

    Raises ConfigError unless they are non-empty strings in a tuple or list.
    """
    name, given = type(environment).__name__, getattr(environment, "stop_strings", None)
    remedy = 'give a tuple, such as ("</answer>",), or ()'
    if not isinstance(given, tuple | list):  # with a plain string, each of its characters would end a turn
        raise _wrong(name, "stop_strings", given, remedy)
    for stop in given:
        if not isinstance(stop, str) or not stop:
            raise _wrong(name, "stop_strings holds", stop, "give non-empty strings")
    return tuple(given)


async def step(environment: AnyEnvironment, action: str | Completion) -> StepResult:
    """Return the result of `environment.step`, with its numbers converted to Python's types.

    The environment gets the text of a Completion. A CompletionEnvironment gets the whole of it.
    Raises ConfigError unless the result is a StepResult whose fields have the declared types.
    """
    takes_all = isinstance(environment, CompletionEnvironment)
    given = action.text if isinstance(action, Completion) and not takes_all else action
    name = "complete" if takes_all else "step"
    where = f"{type(environment).__name__}.{name}()"
    result = await _awaitable(environment, name, given)
    if not isinstance(result, StepResult):
        raise _wrong(where, "returned", result, "return an environments.base.StepResult")
    _check_text(where, "observation", result.observation)
    _check_text(where, "detail", result.detail)
    reward, flags = _number(where, result.reward), {}
    for name in ("done", "valid"):
        flags[name] = _flag(where, name, getattr(result, name))
    calls = _count(where, "tool_calls", result.tool_calls)
    if flags["done"] and result.outcome not in OUTCOMES:
        raise _wrong(where, "returned done=True with outcome", result.outcome, _choose())
    if not flags["done"] and result.outcome is not None:
        raise _wrong(where, "returned done=False with outcome", result.outcome, "set it when done only")
    return StepResult(
        result.observation,
        reward,
        **flags,
        tool_calls=calls,
        outcome=result.outcome,
        detail=result.detail,
        request=result.request,
        metrics=metrics(where, result.metrics),
    )


def metrics(where: str, given: object) -> dict[str, float]:
    """Return the metrics of an environment with Python's floats.

    Raises ConfigError unless they are at most MAX_METRICS finite numbers with names of METRIC.
    """
    if not isinstance(given, Mapping) or len(given) > MAX_METRICS:
        raise _wrong(where, "returned metrics", given, f"give at most {MAX_METRICS} numbers by name")
    found: dict[str, float] = {}
    for name, value in given.items():
        if not isinstance(name, str) or not METRIC.fullmatch(name):
            raise _wrong(where, "returned a metric named", name, "use 1 to 64 letters, digits and _ . / -")
        found[name] = finite(where, f"metrics[{name!r}]", value)
    return found


def scored(where: str, given: object) -> tuple[float, dict[str, float]]:
    """Return the reward and the metrics that a user's reward function gave.

    given: a number, or a mapping with "reward" and metrics. Raises ConfigError unless all are finite numbers.
    Example: {"reward": 1.0, "length": 12} gives (1.0, {"length": 12.0}).
    """
    if not isinstance(given, Mapping):
        return finite(where, "", given), {}
    if "reward" not in given:
        raise _wrong(where, "returned", given, 'return a number, or a mapping with "reward"')
    others = {name: value for name, value in given.items() if name != "reward"}
    return finite(where, "reward", given["reward"]), metrics(where, others)


def finite(where: str, name: str, value: object) -> float:
    """Return a number as Python's float. Raises ConfigError unless it is a finite number."""
    number = _number(where, value, name)
    if not math.isfinite(number):
        raise _wrong(where, f"returned {name}".rstrip(), number, "return a finite number")
    return number


async def close(environment: AnyEnvironment) -> None:
    """Call `environment.close`. Raises ConfigError if it is missing or not a coroutine function."""
    await _awaitable(environment, "close")


async def _awaitable(environment: AnyEnvironment, name: str, *arguments: object) -> Any:
    method = getattr(environment, name, None)
    if not callable(method):
        raise ConfigError(f"{type(environment).__name__}.{name}: is missing; write `async def {name}`")
    returned: Awaitable[Any] = method(*arguments)
    if not inspect.isawaitable(returned):
        raise ConfigError(
            f"{type(environment).__name__}.{name}(): cannot be awaited; write `async def {name}`"
        )
    return await returned


def _check_text(where: str, name: str, value: object) -> None:
    if not isinstance(value, str):
        raise _wrong(where, f"returned {name}", value, "return a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _wrong(
            where, f"returned {name} with", value[error.start], "remove unpaired surrogates"
        ) from None


def _number(where: str, value: object, name: str = "reward") -> float:
    # numpy's numbers are registered as numbers.Real; torch's tensors are not
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, bool) or getattr(value, "shape", None) == ():
        return float(value)  # type: ignore[arg-type]
    raise _wrong(where, f"returned {name}".rstrip(), value, "return a number")


def _flag(where: str, name: str, value: object) -> bool:
    if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):  # numpy's
        return bool(value)
    raise _wrong(where, f"returned {name}", value, "return True or False")


def _count(where: str, name: str, value: object) -> int:
    if isinstance(value, numbers.Integral) and int(value) >= 0:  # numpy's integers, True and False too
        return int(value)
    if type(value).__name__ == "bool_":  # numpy's
        return int(bool(value))
    raise _wrong(where, f"returned {name}", value, "return a whole number of at least 0")


def _choose() -> str:
    return f"choose from {', '.join(OUTCOMES)}"


def _wrong(where: str, what: str, value: object, remedy: str) -> ConfigError:
    shown = repr(value).encode("ascii", "backslashreplace").decode()
    shown = shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}.."
    return ConfigError(f"{where}: {what} {shown}; {remedy}")
