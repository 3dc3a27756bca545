"""The user's agent: a coroutine function, or a command. Its result is the reward, perhaps with details.

A command has one process per episode, and leaves no process and no file behind. A process belongs to it if it
is in the command's session, if its environment has the key of the episode, or if it descends from such a
process. One that starts a session of its own, clears its environment and outlives its parents is not found:
only a sandbox with its own process ids ends that one too.
"""

import asyncio
import inspect
import json
import logging
import os
import signal
import tempfile
import time
from asyncio.subprocess import PIPE, Process, SubprocessStreamProtocol
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any, cast

from megatron_stppo.base.printing import one_line
from megatron_stppo.base.types import Outcome, Task
from megatron_stppo.config import ConfigError, EnvironmentConfig, user_code
from megatron_stppo.environments import contract
from megatron_stppo.environments.base import AgentEpisode, StepResult

MOST_IN_VARIABLE = 100_000  # bytes of a task: Linux limits a variable to 128 KiB
# The variables that a command gets from the run, besides those of environment.command_variables.
INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "PYTHONPATH", "VIRTUAL_ENV", "NO_PROXY", "no_proxy")
MAX_OUTPUT = 2**16  # bytes of a command's output that are kept, the last ones
PATIENCE = 2.0  # seconds for processes to be gone after they were killed
TICKS = os.sysconf("SC_CLK_TCK")  # per second, the unit of the start of a process
log = logging.getLogger(__name__)
Agent = Callable[[AgentEpisode], Awaitable[Any]]


def open_agent(config: EnvironmentConfig) -> Agent:
    """Return the configured agent. Raises ConfigError unless it is a coroutine function."""
    if config.command is not None:
        return partial(_commanded, config.command, config.command_variables)
    assert config.agent is not None, "the section requires an agent or a command"
    where = f"environment.agent={config.agent}"
    agent = user_code.function(where, config.agent, config.modules, "agent")
    if not inspect.iscoroutinefunction(agent):
        raise ConfigError(f"{where}: is not a coroutine function; write `async def`")
    function: Agent = agent
    return function


def result_of(returned: Any) -> StepResult:
    """Return the end of an episode from what its agent has returned.

    A number is the reward. A dict has "reward", perhaps "outcome" and "detail", and own metrics.
    Without "outcome", an episode with a reward of at least 1 is ok. Raises WrongValue for anything else.
    Example: {"reward": 0.5, "detail": "2 of 4", "moves": 7} is a wrong episode with the metric moves.
    """
    fields = dict(returned) if isinstance(returned, Mapping) else {"reward": returned}
    outcome, detail = fields.pop("outcome", None), fields.pop("detail", "")
    reward, metrics = contract.scored("the agent", fields)
    outcome = ("ok" if reward >= 1 else "wrong") if outcome is None else outcome
    if outcome not in contract.OUTCOMES or not isinstance(detail, str):
        raise contract.WrongValue(
            f"the agent returned outcome={_shown(outcome)}, detail={_shown(detail)}; give an outcome of "
            f"{', '.join(contract.OUTCOMES)}, and text"
        )
    return StepResult(
        "", reward, True, True, outcome=cast(Outcome, outcome), detail=one_line(detail), metrics=metrics
    )


def _shown(value: Any) -> str:
    return one_line(ascii(value)[:80])


async def _commanded(command: Sequence[str], variables: Sequence[str], episode: AgentEpisode) -> Any:
    """Return the result in the last line of a command. It is data of the episode: an error is an outcome."""
    line = await last_line(command, variables, episode)
    try:
        returned = json.loads(line)
        result_of(returned)
    except (ValueError, RecursionError) as error:
        raise CommandFailed(f"the command's last line is {_shown(line)}: {error}") from None
    return returned


class CommandFailed(RuntimeError):
    """A command of an agent ended with an error, or its last line is not a result."""


async def last_line(command: Sequence[str], variables: Sequence[str], episode: AgentEpisode) -> str:
    """Play an episode with a program, and return the last line of its output.

    The program runs without a shell, in a session of its own, and reads its task from the standard input.
    TMPDIR is an empty folder. When the program ends, or this call is cancelled, all of its processes are
    killed and the folder is removed.
    """
    task = as_json(episode.task)
    folder = tempfile.TemporaryDirectory(prefix="episode-", ignore_cleanup_errors=True)
    try:
        return await _played(command, _environment(variables, episode, task, folder.name), task)
    finally:
        await asyncio.to_thread(folder.cleanup)


async def _played(command: Sequence[str], environment: dict[str, str], task: str) -> str:
    loop, since = asyncio.get_running_loop(), time.clock_gettime(time.CLOCK_BOOTTIME)
    transport, protocol = await loop.subprocess_exec(
        lambda: _Watched(MAX_OUTPUT, loop),
        *command,
        env=environment,
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        start_new_session=True,
    )
    process = Process(transport, protocol, loop)
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    feeding = asyncio.ensure_future(_feed(process.stdin, task.encode()))
    reading = asyncio.gather(_last(process.stdout), _last(process.stderr))
    ending = asyncio.gather(reading, process.wait())
    try:
        await protocol.exited.wait()
    finally:
        feeding.cancel()  # a program need not read its task
        await asyncio.to_thread(kill, process.pid, environment["OPENAI_API_KEY"], since)
        await asyncio.wait({ending}, timeout=PATIENCE)  # the rest of the output
        transport.close()  # if a process holds the output that could not be found
    (out, err), status = await ending
    if status:
        said = one_line(err.decode("utf-8", "replace").strip().rpartition("\n")[2])
        raise CommandFailed(f"the command ended with status {status}: {said}")
    lines = out.decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else ""


class _Watched(SubprocessStreamProtocol):
    """asyncio's streams of a process, whose end is seen although processes that it left hold its output.

    Process.wait() of Python 3.11 also waits until the output is closed.
    """

    def __init__(self, limit: int, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(limit, loop)
        self.exited = asyncio.Event()

    def process_exited(self) -> None:
        super().process_exited()
        self.exited.set()


def _environment(variables: Sequence[str], episode: AgentEpisode, task: str, folder: str) -> dict[str, str]:
    kept = {name: os.environ[name] for name in (*INHERITED, *variables) if name in os.environ}
    given = {
        "OPENAI_BASE_URL": episode.base_url,
        "OPENAI_API_KEY": episode.api_key,
        "ANTHROPIC_BASE_URL": episode.anthropic_base_url,
        "ANTHROPIC_AUTH_TOKEN": episode.api_key,
        "MEGATRON_STPPO_MODEL": episode.model,
        "MEGATRON_STPPO_SEED": str(episode.seed),
        "TMPDIR": folder,
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


def kill(leader: int, key: str, since: float) -> None:
    """Kill the processes of a command, again until none is left, because they may start others meanwhile.

    leader: process id of the command, which leads its session. key: a text that only environments of this
    episode contain. since: seconds of CLOCK_BOOTTIME before which none of them was started.
    """
    deadline = time.monotonic() + PATIENCE
    while left := _running(leader, key.encode(), int((since - 1.0) * TICKS)):
        if time.monotonic() > deadline:
            log.warning("%d processes of a command cannot be killed: %s", len(left), sorted(left)[:5])
            break
        for process in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.005)


def _running(leader: int, key: bytes, since: int) -> set[int]:
    parents: dict[int, int] = {}
    own: set[int] = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        process = int(name)
        with suppress(OSError):  # it has ended, or another user owns it
            # after the program's name in parentheses: state, parent, process group, session, ..., start
            fields = _read(process, "stat").rpartition(b")")[2].split()
            state, parent, session, start = fields[0], int(fields[1]), int(fields[3]), int(fields[19])
            if start < since or state in (b"Z", b"X"):  # it is older, or has ended
                continue
            parents[process] = parent
            if session == leader or key in _read(process, "environ"):
                own.add(process)
    while more := {process for process, parent in parents.items() if parent in own} - own:
        own |= more
    return own


def _read(process: int, name: str) -> bytes:
    with open(f"/proc/{process}/{name}", "rb", buffering=0) as file:
        return file.read()
