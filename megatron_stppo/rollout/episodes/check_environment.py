"""Test an environment: play scripted episodes without a model, and report what is wrong.

The rules are those of a rollout: environments/contract.py checks every return value, `environment.deadline`
limits every call, and a call that does not await blocks all episodes.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from megatron_stppo.base.types import Message, Task
from megatron_stppo.config import ConfigError, EnvironmentConfig
from megatron_stppo.environments import choose, contract
from megatron_stppo.environments.base import Environment, StepResult
from megatron_stppo.rollout.episodes.failures import described

TICK = 0.01  # seconds
STALL = 0.5  # seconds without an await after which a call is reported
PATIENCE = 2.0  # seconds beyond the deadline after which a call that never awaits is interrupted
TASK = Task("check-environment", (Message("user", "What is the answer?"),), ("42",), "train", 0)
Episode = tuple[Any, ...]  # what the environment returned, for comparison


@dataclass
class Found:
    """The result of the scripted episodes. Example: Found(["Guess.step(): returned None; .."], 3, 7)."""

    problems: list[str] = field(default_factory=list)
    episodes: int = 0
    turns: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)

    def add(self, problem: str) -> None:
        line = " ".join(problem.split())
        if line not in self.problems:
            self.problems.append(line)


def check(section: EnvironmentConfig, tasks: Sequence[Task] = (), actions: Sequence[str] = ()) -> Found:
    """Play one episode for every action of `actions` (default: those of `script`), and return what was found.

    An episode repeats its action until the environment is done or has no turns left. The episodes use the
    given tasks in turn (default: one fixed task).
    """
    found = Found()
    try:
        choose.check(section)
        make = choose.factory(section)
    except ConfigError as error:
        found.add(str(error))
        return found
    signal.signal(signal.SIGALRM, _interrupt)
    try:
        asyncio.run(_check(section, make, tasks or (TASK,), actions, found))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return found


def script(task: Task, stops: Sequence[str]) -> list[str]:
    """Return what a policy may write: nothing, prose, the answer, a search, special tokens, long text."""
    right = task.targets[0]
    endings = [f"a guess{stop}" for stop in stops]
    tags = [f"<answer>{right}</answer>", f"<search>{right}</search>", "<answer>unclosed"]
    return ["", "I do not know.", right, *tags, *endings, "<|im_end|>\x00\u202e", "word " * 2_000]


async def _check(
    section: EnvironmentConfig,
    make: Callable[[], Environment],
    tasks: Sequence[Task],
    actions: Sequence[str],
    found: Found,
) -> None:
    player = _Player(section, found)
    first, second = player.make(make), player.make(make)
    if first is None or second is None:
        return
    if first is second:
        found.add(
            f"environment.kind={section.kind}: the factory's function returned the same object twice; return "
            "a new one for every episode"
        )
    await player.play(first, tasks[0], ["hello"])
    stops = player.stops
    for number in range(len(actions) or len(script(tasks[0], stops))):
        task = tasks[number % len(tasks)]
        action = (actions or script(task, stops))[number]
        alone = await player.play(player.make(make), task, [action])
        beside = await player.beside(player.make(make), player.make(make), task, tasks[-1], action)
        if alone is not None and beside is not None and repr(alone) != repr(beside):  # NaN equals nothing
            found.add(
                f"{type(first).__name__}: the same task, seed and actions gave a different result "
                "while a second episode was running; keep all state in the object, and draw random numbers "
                "from `seed`"
            )


class _Player:
    """Calls environments as a rollout does, one call at a time, and records what is wrong."""

    def __init__(self, section: EnvironmentConfig, found: Found) -> None:
        self._section, self._found = section, found
        self.stops: tuple[str, ...] = ()

    def make(self, make: Callable[[], Environment]) -> Environment | None:
        try:
            return make()
        except Exception as error:  # the user's code may raise any exception
            self._found.add(
                f"environment.kind={self._section.kind}: making an episode's environment raised "
                f"{type(error).__name__}: {error}; correct its __init__"
            )
            return None

    async def play(
        self, environment: Environment | None, task: Task, actions: Sequence[str], after: Any = None
    ) -> Episode | None:
        """Return the results of reset and steps, or None if a call failed. Awaits `after` between calls."""
        if environment is None:
            return None
        self._found.episodes += 1
        answers: list[Any] = [await self._call(environment, "reset", contract.reset(environment, task, 7))]
        if answers[0] is not None:
            try:
                self.stops = contract.stop_strings(environment)
            except contract.WrongValue as error:
                self._found.add(str(error))
        most, result = self._section.max_turns + 1, None
        for turn in range(most):
            if answers[-1] is None:
                break
            if after is not None:
                await after(turn)
            call = contract.step(environment, actions[turn % len(actions)])
            result = await self._call(environment, "step", call)
            answers.append(result)
            if result is not None:
                self._look(environment, result)
            if result is None or result.done:
                break
        else:
            self._found.add(
                f"{type(environment).__name__}.step(): not done after {most} turns (environment.max_turns="
                f"{self._section.max_turns} plus one for the answer); return done=True with an outcome by "
                "then"
            )
        await self._call(environment, "close", contract.close(environment))
        return None if None in answers else tuple(answers)

    async def beside(
        self, one: Environment | None, other: Environment | None, task: Task, second: Task, action: str
    ) -> Episode | None:
        """Return the results of `one` while `other` plays a different episode between its calls."""
        if one is None or other is None:
            return None

        async def disturb(turn: int) -> None:
            if turn == 0:
                await self.play(other, second, ["another episode's action"])

        return await self.play(one, task, [action], disturb)

    def _look(self, environment: Environment, result: StepResult) -> None:
        self._found.turns += 1
        if left_out := [name for name, value in result.metrics.items() if value is None]:
            self._found.add(
                f"{type(environment).__name__}.step(): metrics that are left out: {', '.join(left_out)}; "
                f"{contract.METRIC_RULE}"
            )
        if result.outcome is not None:
            self._found.outcomes[result.outcome] += 1

    async def _call(self, environment: Environment, name: str, call: Awaitable[Any]) -> Any:
        where, deadline = f"{type(environment).__name__}.{name}()", self._section.deadline
        stalls: list[float] = []
        started, ticking = time.monotonic(), asyncio.create_task(_tick(stalls))
        await asyncio.sleep(0)
        signal.setitimer(signal.ITIMER_REAL, deadline + PATIENCE)
        try:
            async with asyncio.timeout(deadline):
                return await call
        except (contract.NotAnEnvironment, contract.WrongValue) as error:
            self._found.add(str(error))
        except _Blocked:
            stalls.append(deadline + PATIENCE)
        except TimeoutError:
            self._found.add(f"{where}: no answer within environment.deadline={deadline:g} s; answer sooner")
        except KeyboardInterrupt:  # Ctrl-C reaches this thread
            raise
        except BaseException as error:
            self._found.add(f"{where}: raised {described(error)}; the episode ends as an error")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            if time.monotonic() - started > STALL:
                await asyncio.sleep(2 * TICK)  # lets _tick record a call that blocked the event loop
            ticking.cancel()
            if max(stalls, default=0.0) > STALL:
                self._found.add(
                    f"{where}: blocked the event loop for {max(stalls):.1f} s, and with it all other "
                    "episodes; await, or run what blocks in asyncio.to_thread"
                )
        return None


class _Blocked(Exception):
    """Raised inside a call that neither awaited nor returned in time."""


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise _Blocked


async def _tick(stalls: list[float]) -> None:
    """Record the seconds between two iterations of the event loop in `stalls`."""
    while True:
        before = time.monotonic()
        await asyncio.sleep(TICK)
        stalls.append(time.monotonic() - before)
