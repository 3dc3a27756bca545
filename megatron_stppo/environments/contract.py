"""Calls of a user's environment, with checks of what it returns.

A value that cannot be used would fail far from its cause, or in all episodes of a batch. It is a WrongValue,
which becomes the outcome of its episode, as any exception of an environment does: data of one episode never
ends a run. Only a class without the methods of an environment is NotAnEnvironment, which ends the run with
exit code 2. A metric that cannot be used is left out.
"""

import inspect
import math
import numbers
import re
from collections.abc import Awaitable, Mapping
from typing import Any, get_args

from megatron_stppo.base.printing import one_line
from megatron_stppo.base.types import Message, Outcome, Task
from megatron_stppo.config import ConfigError
from megatron_stppo.data.values import plain
from megatron_stppo.environments.base import (
    AnyEnvironment,
    Completion,
    CompletionEnvironment,
    Request,
    StepResult,
)

OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
MAX_SHOWN = 60  # characters of a wrong value in a message
MAX_METRICS = 32  # of an episode's step
METRIC = re.compile(r"[A-Za-z0-9_./-]{1,64}")  # names that metrics.jsonl, TensorBoard can show
METRIC_RULE = "give finite numbers, with names of 1 to 64 letters, digits and _ . / -"
MAX_REWARD = 1e9  # of a turn; sums of squares of larger ones are infinite in float32, for a whole batch
MAX_COUNT = 10**6  # of tools that a turn calls; ranks exchange integers of 64 bits


class WrongValue(ValueError):
    """A value of an environment that cannot be used, in one line with the remedy."""


class NotAnEnvironment(ConfigError):
    """An object without the methods of an environment: an error of its author, which ends the run."""


async def reset(environment: AnyEnvironment, task: Task, seed: int) -> tuple[Message, ...] | Request:
    """Return the messages of `environment.reset`, or the first request of a CompletionEnvironment.

    Raises WrongValue unless they are Messages with text.
    """
    where = f"{type(environment).__name__}.reset()"
    messages = await _awaitable(environment, "reset", task, seed)
    if isinstance(messages, Request) and isinstance(environment, CompletionEnvironment):
        return messages
    if not isinstance(messages, list | tuple) or not messages:
        raise _wrong(where, "returned", messages, "return a list of at least one types.Message")
    return tuple(_message(f"{where}[{position}]", message) for position, message in enumerate(messages))


def stop_strings(environment: AnyEnvironment) -> tuple[str, ...]:
    """Return the strings that end a turn.

    Raises WrongValue unless they are non-empty strings in a tuple or list.
    """
    name, stops = type(environment).__name__, getattr(environment, "stop_strings", None)
    remedy = 'give a tuple, such as ("</answer>",), or ()'
    if not isinstance(stops, tuple | list):  # with a plain string, each of its characters would end a turn
        raise _wrong(name, "stop_strings", stops, remedy)
    for stop in stops:
        if not isinstance(stop, str) or not stop:
            raise _wrong(name, "stop_strings holds", stop, "give non-empty strings")
    return tuple(_text(name, "a stop string", stop) for stop in stops)


async def step(environment: AnyEnvironment, action: str | Completion) -> StepResult:
    """Return the result of `environment.step`, with its numbers converted to Python's types.

    The environment gets the text of a Completion. A CompletionEnvironment gets the whole of it.
    Raises WrongValue unless the result is a StepResult whose fields have the declared types and are usable.
    A metric that is not usable is None.
    """
    takes_all = isinstance(environment, CompletionEnvironment)
    passed = action.text if isinstance(action, Completion) and not takes_all else action
    name = "complete" if takes_all else "step"
    where = f"{type(environment).__name__}.{name}()"
    result = await _awaitable(environment, name, passed)
    if not isinstance(result, StepResult):
        raise _wrong(where, "returned", result, "return an environments.base.StepResult")
    if result.request is not None and not (takes_all and isinstance(result.request, Request)):
        raise _wrong(where, "returned request", result.request, "do not set it")
    done, outcome = _flag(where, "done", result.done), result.outcome
    if done and outcome not in OUTCOMES:
        raise _wrong(where, "returned done=True with outcome", outcome, f"choose from {', '.join(OUTCOMES)}")
    if not done and outcome is not None:
        raise _wrong(where, "returned done=False with outcome", outcome, "set it when done only")
    return StepResult(
        _text(where, "observation", result.observation),
        _reward(where, "reward", result.reward),
        done,
        _flag(where, "valid", result.valid),
        tool_calls=_count(where, "tool_calls", result.tool_calls),
        outcome=OUTCOMES[OUTCOMES.index(outcome)] if outcome is not None else None,
        detail=_text(where, "detail", result.detail),
        request=result.request,
        # an agent has given as many, and the endpoint adds its own
        metrics=metrics(where, result.metrics, 2 * MAX_METRICS if takes_all else MAX_METRICS),
    )


def metrics(where: str, given: object, most: int = MAX_METRICS) -> dict[str, float | None]:
    """Return the metrics of an environment with Python's floats; None for one that breaks METRIC_RULE.

    Raises WrongValue unless they are at most `most` values by name.
    Example: {"score": 1, "search calls": 2, "loss": nan} gives {"score": 1.0, "search_calls": None,
    "loss": None}.
    """
    if not isinstance(given, Mapping) or len(given) > most:
        raise _wrong(where, "returned metrics", given, f"give at most {MAX_METRICS} numbers by name")
    usable: dict[str, float | None] = {}
    for name, value in given.items():
        if isinstance(name, str) and METRIC.fullmatch(name):
            usable[_exactly(name)] = number if math.isfinite(number := _float(value)) else None
        else:
            usable.setdefault(re.sub("[^A-Za-z0-9_./-]", "_", f"{name}"[:64]) or "_", None)
    return usable


def scored(where: str, given: object) -> tuple[float, dict[str, float | None]]:
    """Return the reward and the metrics that a user's reward function gave.

    given: a number, or a mapping with "reward" and metrics. Raises WrongValue for another reward; metrics are
    those of `metrics`.
    Example: {"reward": 1.0, "length": 12} gives (1.0, {"length": 12.0}).
    """
    if not isinstance(given, Mapping):
        return _reward(where, "", given), {}
    if "reward" not in given:
        raise _wrong(where, "returned", given, 'return a number, or a mapping with "reward"')
    others = {name: value for name, value in given.items() if name != "reward"}
    return _reward(where, "reward", given["reward"]), metrics(where, others)


async def close(environment: AnyEnvironment) -> None:
    """Call `environment.close`. Raises NotAnEnvironment if it is missing or not a coroutine function."""
    await _awaitable(environment, "close")


async def _awaitable(environment: AnyEnvironment, name: str, *arguments: object) -> Any:
    method = getattr(environment, name, None)
    if not callable(method):
        raise NotAnEnvironment(f"{type(environment).__name__}.{name}: is missing; write `async def {name}`")
    returned: Awaitable[Any] = method(*arguments)
    if not inspect.isawaitable(returned):
        raise NotAnEnvironment(
            f"{type(environment).__name__}.{name}(): cannot be awaited; write `async def {name}`"
        )
    return await returned


def _message(where: str, given: object) -> Message:
    if not isinstance(given, Message):
        raise _wrong(where, "returned", given, 'return a types.Message, such as Message("user", "..")')
    role, content = _text(where, "role", given.role), _text(where, "content", given.content)
    try:
        return Message(role, content, plain(given.extra, where, "extra"))  # ranks exchange it
    except ConfigError as error:  # here it is a value of one episode
        raise WrongValue(str(error)) from None


def _text(where: str, name: str, value: object) -> str:
    """Return the text as a str of Python. Raises WrongValue unless it can be encoded as UTF-8."""
    if not isinstance(value, str):
        raise _wrong(where, f"returned {name}", value, "return a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _wrong(
            where, f"returned {name} with", value[error.start], "remove unpaired surrogates"
        ) from None
    return _exactly(value)


def _exactly(text: str) -> str:
    return str.__str__(text)  # ranks cannot exchange subclasses, such as numpy's


def _reward(where: str, name: str, value: object) -> float:
    number, what = _float(value), f"returned {name}".rstrip()
    if not _is_number(value):
        raise _wrong(where, what, value, "return a number")
    if not abs(number) <= MAX_REWARD:
        raise _wrong(where, what, value, f"return a finite number from -{MAX_REWARD:g} to {MAX_REWARD:g}")
    return number


def _is_number(value: object) -> bool:
    # numpy's numbers are registered as numbers.Real; torch's tensors are not
    return isinstance(value, numbers.Real) or getattr(value, "shape", None) == ()


def _float(value: object) -> float:
    """Return a number of Python, numpy or torch as Python's float; NaN for anything else."""
    try:
        return float(value) if _is_number(value) else math.nan  # type: ignore[arg-type]
    except (ArithmeticError, ValueError, TypeError, RuntimeError):  # such as 10**400
        return math.nan


def _flag(where: str, name: str, value: object) -> bool:
    if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):  # numpy's
        return bool(value)
    raise _wrong(where, f"returned {name}", value, "return True or False")


def _count(where: str, name: str, value: object) -> int:
    if isinstance(value, numbers.Integral) and 0 <= int(value) <= MAX_COUNT:  # numpy's integers, True, False
        return int(value)
    if type(value).__name__ == "bool_":  # numpy's
        return int(bool(value))
    raise _wrong(where, f"returned {name}", value, f"return a whole number from 0 to {MAX_COUNT}")


def _wrong(where: str, what: str, value: object, remedy: str) -> WrongValue:
    shown = one_line(ascii(value)[: MAX_SHOWN + 1])
    shown = shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}.."
    return WrongValue(f"{where}: {what} {shown}; {remedy}")
