"""The user's agent: a coroutine function, or a command. Its result is the reward, perhaps with details."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any, cast

from megatron_stppo.base.printing import one_line
from megatron_stppo.base.types import Outcome, Task
from megatron_stppo.config import ConfigError, EnvironmentConfig, own_code
from megatron_stppo.environments import contract
from megatron_stppo.environments.base import AgentEpisode, StepResult

MOST_IN_VARIABLE = 100_000  # bytes of a task: Linux limits a variable to 128 KiB
# The variables that a command gets from the run, besides those of environment.command_variables.
INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ", "PYTHONPATH", "VIRTUAL_ENV")
MAX_OUTPUT = 2**16  # bytes of a command's output that are kept, the last ones
WHERE = "the agent"  # the subject of messages about its result


Agent = Callable[[AgentEpisode], Awaitable[Any]]


def open_agent(config: EnvironmentConfig) -> Agent:
    """Return the configured agent. Raises ConfigError unless it is a coroutine function."""
    if config.command is not None:
        return partial(_run, config.command, config.command_variables)
    assert config.agent is not None, "the section requires an agent or a command"
    where = f"environment.agent={config.agent}"
    agent = own_code.function(where, config.agent, config.modules, "agent")
    if not inspect.iscoroutinefunction(agent):
        raise ConfigError(f"{where}: is not a coroutine function; write `async def`")
    function: Agent = agent
    return function


def result_of(returned: Any) -> StepResult:
    """Return the end of an episode from what its agent has returned.

    A number is the reward. A dict has "reward", perhaps "outcome" and "detail", and own metrics.
    Without "outcome", an episode with a reward above 0 is ok. Raises WrongValue for anything else.
    Example: {"reward": 0.5, "detail": "2 of 4", "moves": 7} is an ok episode with the metric moves.
    """
    fields = dict(returned) if isinstance(returned, Mapping) else {"reward": returned}
    outcome, detail = fields.pop("outcome", None), fields.pop("detail", "")
    reward, metrics = contract.scored(WHERE, fields)
    outcome = ("ok" if reward > 0 else "wrong") if outcome is None else outcome
    if outcome not in contract.OUTCOMES or not isinstance(detail, str):
        raise contract.WrongValue(
            f"{WHERE} returned outcome={_shown(outcome)}, detail={_shown(detail)}; give an outcome of "
            f"{', '.join(contract.OUTCOMES)}, and text"
        )
    return StepResult(
        "", reward, True, True, outcome=cast(Outcome, outcome), detail=one_line(detail), metrics=metrics
    )


def _shown(value: Any) -> str:
    return one_line(ascii(value)[:80])


class CommandFailed(RuntimeError):
    """A command of an agent ended with an error, or its last line is not a result."""


async def _run(command: Sequence[str], variables: Sequence[str], episode: AgentEpisode) -> Any:
    """Play an episode with an agent that is a program, in a session of its own, without a shell.

    It reads its task from the standard input.
    """
    task = as_json(episode.task)
    process = await asyncio.create_subprocess_exec(
        *command,
        env=_environment(variables, episode, task),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    feeding = asyncio.ensure_future(_feed(process.stdin, task.encode()))
    try:
        out, err = await asyncio.gather(_last(process.stdout), _last(process.stderr))
        status = await process.wait()
    finally:
        feeding.cancel()  # a program need not read its task
        with suppress(ProcessLookupError):  # also its children, if the episode is cancelled
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    if status:
        said = one_line(err.decode("utf-8", "replace").strip().rpartition("\n")[2])
        raise CommandFailed(f"the command ended with status {status}: {said}")
    lines = out.decode("utf-8", "replace").strip().splitlines()
    return _parsed(lines[-1] if lines else "")


def _environment(variables: Sequence[str], episode: AgentEpisode, task: str) -> dict[str, str]:
    kept = {name: os.environ[name] for name in (*INHERITED, *variables) if name in os.environ}
    given = {
        "OPENAI_BASE_URL": episode.base_url,
        "OPENAI_API_KEY": episode.api_key,
        "ANTHROPIC_BASE_URL": episode.anthropic_base_url,
        "ANTHROPIC_AUTH_TOKEN": episode.api_key,
        "MEGATRON_STPPO_MODEL": episode.model,
        "MEGATRON_STPPO_SEED": str(episode.seed),
    }
    if len(task) <= MOST_IN_VARIABLE:
        given["MEGATRON_STPPO_TASK"] = task
    return kept | given


def as_json(task: Task) -> str:
    """Return a task as a command gets it: one line of ASCII. A message has its keys as in the data."""
    return json.dumps(asdict(task) | {"prompt": [message.as_dict() for message in task.prompt]})


async def _feed(stream: asyncio.StreamWriter, text: bytes) -> None:
    """Write the text and close the stream. A program that ends before it has read everything is no error."""
    with suppress(ConnectionError):
        stream.write(text)
        await stream.drain()
    stream.close()


async def _last(stream: asyncio.StreamReader) -> bytes:
    """Read to the end, and return the last MAX_OUTPUT bytes."""
    kept = b""
    while part := await stream.read(MAX_OUTPUT):
        kept = (kept + part)[-MAX_OUTPUT:]
    return kept


def _parsed(line: str) -> Any:
    """Return the result in the last line of a command. It is data of the episode: an error is an outcome."""
    try:
        returned = json.loads(line)
        result_of(returned)
    except (ValueError, RecursionError) as error:
        raise CommandFailed(f"the command's last line is {_shown(line)}: {error}") from None
    return returned
