"""The environments of one engine group, run by asyncio in a separate thread beside the engine's steps.

At most `concurrency` calls run at a time. Each has `deadline` seconds from its start. Any exception of an
environment, such as SystemExit, or a missed deadline becomes the outcome of its episode; it is logged and
does not stop the other episodes. So does a value that cannot be used (environments/contract.py). After
ToolAway, however, the call is repeated (ToolWait), each time with a new deadline. An object that is not
an environment ends the run.
The host runs on the group's first rank only. Its answers are plain data, which is broadcast to the other
ranks.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from typing import TypeVar

from megatron_stppo.base.errors import Abandoned, ToolsStayAway
from megatron_stppo.base.printing import one_line
from megatron_stppo.base.types import Message, Outcome, Task
from megatron_stppo.environments import contract
from megatron_stppo.environments.base import (
    AnyEnvironment,
    Completion,
    CompletionEnvironment,
    Request,
    StepResult,
    ToolAway,
)
from megatron_stppo.rollout.episodes.failures import FailureLines, coroutines_of, described, text_of
from megatron_stppo.rollout.vllm.generation import RolloutError

log = logging.getLogger(__name__)
GLANCE = 0.1  # seconds after which a delayed event loop's coroutines are looked up
BEAT = 0.5  # seconds between signs of life of the event loop
CLOSING = 2.0  # seconds that environments get to close if their episodes are abandoned
# Seconds until an environment that computes lets the engine's thread go on after the GPU; Python's: 0.005
SWITCH = 0.0005
FIRST, LONGEST = 0.5, 5.0  # seconds between two attempts of a call; doubled each time, up to LONGEST
BEGINS = "%stools do not answer: %s; waiting for up to %.0f s (environment.tool_wait)"
T = TypeVar("T")
PATIENCE = 10.0  # seconds; an event loop without a sign of life for deadline + PATIENCE counts as blocked


@dataclass(frozen=True)
class Answer:
    """The result of one environment call: messages or a request (reset), or a StepResult (step, any failure).

    Example: Answer(3, result=StepResult("..", 0.0, False, True, 1)).
    """

    index: int
    messages: tuple[Message, ...] = ()
    stop_strings: tuple[str, ...] = ()
    request: Request | None = None  # in place of the messages, of a CompletionEnvironment
    result: StepResult | None = None
    misuse: str = ""  # a programming error in the environment; it ends the run


class EnvironmentHost:
    """The thread that runs environments. Use it as a context manager.

    On exit it cancels running calls, closes all environments and ends the thread. After Abandoned it does not
    wait for environments that are slow to close.
    """

    def __init__(
        self,
        make_environment: Callable[[], AnyEnvironment],
        *,
        concurrency: int,
        deadline: float,
        tools: ToolWait | None = None,
        answered: Callable[[], object] = lambda: None,
        lines: FailureLines | None = None,
    ) -> None:
        """tools: how long to wait for tools that do not answer; default: not at all.

        answered: called for every answer, in the thread of the environments, as soon as `take` returns it.
        lines: logs failed calls; default: in the log of this module.
        """
        self._make, self._deadline = make_environment, deadline
        self._tools, self._answered = tools or ToolWait(0), answered
        self._lines = lines or FailureLines(log)
        self._environments: dict[int, AnyEnvironment] = {}
        self._answers: queue.SimpleQueue[tuple[int, Answer]] = queue.SimpleQueue()
        self._taken: list[tuple[int, Answer]] = []  # by `wait`
        self._submitted = 0
        self._calls: set[asyncio.Task[None]] = set()
        self._ready = threading.Event()
        self._concurrency = concurrency
        self._beat = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="environments", daemon=True)

    def __enter__(self) -> EnvironmentHost:
        self._thread.start()
        self._ready.wait()
        self._switch = sys.getswitchinterval()
        sys.setswitchinterval(min(SWITCH, self._switch))  # last, because __exit__ restores it
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        sys.setswitchinterval(self._switch)
        self._loop.call_soon_threadsafe(self._stop.set)
        left = max(0.0, self._beat + self._deadline + PATIENCE - time.monotonic())
        self._thread.join(min(left, CLOSING) if kind is Abandoned else left)
        if self._thread.is_alive():
            what = "do not close in time" if kind is Abandoned else "block the event loop"
            log.error("environments %s%s; their thread is abandoned", what, self._where())

    def reset(self, index: int, task: Task, seed: int) -> None:
        """Make the environment of episode `index` and reset it, in the background; see `take`."""

        async def call() -> Answer:
            if index not in self._environments:  # a first attempt
                self._environments[index] = self._make()
            environment = self._environments[index]
            messages = await contract.reset(environment, task, seed)
            if isinstance(messages, Request):
                return Answer(index, request=messages)
            return Answer(index, messages=messages, stop_strings=contract.stop_strings(environment))

        self._submit(index, call)

    def step(self, index: int, action: str | Completion) -> None:
        """Pass an action to the environment of episode `index`, in the background; see `take`."""

        async def call() -> Answer:
            return Answer(index, result=await contract.step(self._environments[index], action))

        self._submit(index, call)

    def close(self, index: int) -> Future[None]:
        """Close the environment of a finished episode, in the background."""
        return asyncio.run_coroutine_threadsafe(self._close(index), self._loop)

    def take(self, wait_for: int) -> list[Answer]:
        """Wait for at least `wait_for` answers. Return all new answers, in order of submission.

        If `wait_for` is the number of all running calls, the result does not depend on timing. Raises
        RolloutError if an environment blocks the event loop (a call that neither awaits nor returns), and
        ToolsStayAway if tools did not answer in time.
        """
        self.wait(wait_for)
        taken, self._taken = self._taken, []
        return [answer for _, answer in sorted(taken, key=itemgetter(0))]

    def wait(self, wait_for: int, patience: float = math.inf) -> bool:
        """Wait up to `patience` seconds for answers. Return whether `take` need not wait. Raises what it
        raises."""
        ends = time.monotonic() + patience
        while len(self._taken) < wait_for or not self._answers.empty():
            with suppress(queue.Empty):
                self._taken.append(self._answers.get(timeout=BEAT))
            self.check()  # an episode that a missing tool ended is among the answers
            if len(self._taken) < wait_for and time.monotonic() > ends:
                return False
        return True

    def check(self) -> None:
        """Raise what `take` raises while it waits, for a caller that waits for other things too."""
        if self._tools.gave_up:
            raise ToolsStayAway(self._tools.gave_up)
        silent = time.monotonic() - self._beat
        if silent > self._deadline + PATIENCE:
            raise RolloutError(
                f"an environment call has blocked the event loop for {silent:.0f} s{self._where()}; async "
                "code must await, or run what blocks in asyncio.to_thread"
            )

    def lag(self) -> tuple[float, str]:
        """Return the seconds after which the event loop runs a new call, and what it ran meanwhile.

        The second is "" or as " (guess.py:12 in Guess.step)". Raises what `check` raises.
        """
        began, where = time.monotonic(), ""
        probe = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop)
        while not probe.done() and time.monotonic() - began < self._deadline + PATIENCE:
            with suppress(TimeoutError):
                probe.result(GLANCE)
                break
            where = where or self._where()
        self.check()
        return time.monotonic() - began, where

    def _where(self) -> str:
        places = coroutines_of(self._thread.ident or 0)
        return f" ({places})" if places else ""

    def renew_patience(self) -> None:
        """Wait for tools again as long as at the start, and log failures again, as a new rollout does."""
        self._tools.renew()
        self._lines.renew()

    def _submit(self, index: int, call: Callable[[], Awaitable[Answer]]) -> None:
        ticket, self._submitted = self._submitted, self._submitted + 1
        asyncio.run_coroutine_threadsafe(self._guarded(ticket, index, call), self._loop)

    async def _guarded(self, ticket: int, index: int, call: Callable[[], Awaitable[Answer]]) -> None:
        this = asyncio.current_task()
        assert this is not None
        self._calls.add(this)
        this.add_done_callback(self._calls.discard)

        async def attempt() -> Answer:
            async with asyncio.timeout(self._deadline):
                return await call()

        async with self._semaphore:
            try:
                answer = await self._tools.call(attempt)
            except ToolAway as away:  # take() ends the rollout
                answer = self._failed(index, "error", str(away))
            except TimeoutError as error:
                detail = one_line(text_of(error) or f"no answer within {self._deadline:g} s")
                answer = self._failed(index, "timeout", detail)
                self._lines.log(f"episode {index}: environment timed out", error, detail)
            except contract.NotAnEnvironment as error:
                answer = Answer(index, misuse=one_line(str(error)))
            except BaseException as error:  # Ctrl-C reaches the main thread only
                if self._stop.is_set():
                    raise  # __exit__ cancelled the call, not the environment
                # a failure of an environment is an outcome of its episode and does not end the run
                detail = one_line(described(error))
                answer = self._failed(index, "error", detail)
                self._lines.log(f"episode {index}: environment failed", error, detail)
        self._answers.put((ticket, answer))
        self._answered()

    def _failed(self, index: int, outcome: Outcome, detail: str) -> Answer:
        """Return the end of an episode whose environment failed, with the calls of tools that it counts."""
        environment = self._environments.get(index)
        known = isinstance(environment, CompletionEnvironment)
        calls = getattr(environment, "tool_calls", 0) if known else 0
        counted = calls if type(calls) is int and calls > 0 else 0
        return Answer(index, result=StepResult("", 0.0, True, False, counted, outcome, one_line(detail)))

    async def _close(self, index: int) -> None:
        environment = self._environments.pop(index, None)
        if environment is None:
            return
        try:
            async with asyncio.timeout(self._deadline):
                await contract.close(environment)
        except BaseException as error:  # the episode has ended; its result stays valid
            self._lines.log(f"episode {index}: closing failed", error, one_line(described(error)))
        if isinstance(environment, CompletionEnvironment):
            for kind, reason in list(getattr(environment, "refused_requests", {}).items()):
                self._lines.once(kind, f"episode {index}: a request of the agent is refused: {reason}")

    def _run(self) -> None:
        with asyncio.Runner() as runner:
            loop = runner.get_loop()
            serving = loop.create_task(self._serve())
            while not serving.done():
                # a task that an environment has made leaves the loop so; what awaits the task gets it too
                with suppress(SystemExit, KeyboardInterrupt):
                    loop.run_until_complete(serving)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._semaphore = asyncio.Semaphore(self._concurrency)
        beating = asyncio.create_task(self._keep_beating())
        self._ready.set()
        await self._stop.wait()
        for call in list(self._calls):
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        for index in list(self._environments):
            self.close(index)
        beating.cancel()
        await asyncio.sleep(0)  # so that the scheduled calls of _close become tasks
        await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}), return_exceptions=True)

    async def _keep_beating(self) -> None:
        while True:
            self._beat = time.monotonic()
            await asyncio.sleep(BEAT)


class ToolWait:
    """Repetition of the environment calls of one rollout, for `patience` seconds over all waits.

    A wait begins when a call raises ToolAway while no other call waits. It ends when a waiting call returns.
    Each of the two logs one warning. An instance belongs to one event loop.
    Example: with patience=600, tools are away for 8 minutes and later for 3 minutes. The rollout gives up 2
    minutes into the second wait.
    """

    def __init__(self, patience: float, where: str = "") -> None:
        """where: the prefix of the warnings, such as "rank 4: "."""
        self._patience, self._where = patience, where
        self._waiting = 0  # calls
        self._since: float | None = None  # monotonic time; None outside a wait
        self._spent = 0.0  # seconds, over the waits that have ended
        self.gave_up = ""  # the reason for giving up, in one line; empty before

    def renew(self) -> None:
        """Begin a new rollout: waits that have ended no longer count. May be called by any thread."""
        self._spent = 0.0

    async def call(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Return the result of attempt(), which is called again while it raises ToolAway.

        Raises ToolAway when the patience is spent. Other exceptions of attempt() are passed on.
        """
        pause, waits = FIRST, False
        try:
            while True:
                try:
                    result = await attempt()
                    if waits:
                        self._end(f"{self._where}tools answer again after %.0f s")
                    return result
                except ToolAway as away:
                    self._begin(str(away))
                    self._waiting, waits = self._waiting + (not waits), True
                    if (left := self._left()) <= 0:
                        self.gave_up = self.gave_up or gave_up(self._patience, str(away))
                        raise
                await asyncio.sleep(min(pause, left))
                pause = min(2 * pause, LONGEST)
        finally:
            self._waiting -= waits
            if waits and not self._waiting:
                self._end("")  # the last waiting call failed for another reason

    def _begin(self, why: str) -> None:
        if self._since is None:
            self._since = time.monotonic()
            if (left := self._left()) > 0:
                log.warning(BEGINS, self._where, why, left)

    def _end(self, text: str) -> None:
        if self._since is not None:
            seconds, self._since = time.monotonic() - self._since, None
            self._spent += seconds
            if text:
                log.warning(text, seconds)

    def _left(self) -> float:
        now = time.monotonic()
        return self._patience - self._spent - (now - (self._since or now))


def gave_up(patience: float, why: str) -> str:
    return f"tools did not answer for {patience:g} s (environment.tool_wait): {why}"
