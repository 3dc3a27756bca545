"""What a user implements to bring a task of their own: reset, step, close."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from megatron_stppo.types import Message, Outcome, Task


class ToolAway(Exception):
    """A tool answers nobody at present: its server is down, restarts or is overloaded. One line of text.

    An environment raises it from reset or step, in the state that it was in before the call; a factory may
    raise it too. The rollout then makes the same call again until it returns, for up to environment.tool_wait
    seconds; after that the run is checkpointed and ends with exit code 85. A failure that concerns one
    episode only (a query that the tool refuses) is an outcome of that episode instead.
    Example: raise ToolAway("sandbox: connection refused").
    """


@dataclass(frozen=True)
class StepResult:
    """What the environment answers to one action.

    Example: StepResult("\\n\\n<information>..</information>\\n\\n", 0.0, False, True, True) after a search;
    StepResult("", 1.0, True, True, False, "ok", "Paris") after the right answer.
    """

    observation: str  # text the policy reads next; "" when done
    reward: float  # credited to the last action token of this turn
    done: bool
    valid: bool  # the action could be parsed
    searched: bool  # a tool was called
    outcome: Outcome | None = None  # set exactly when done
    detail: str = ""  # one line for people: the extracted answer, or what failed


@runtime_checkable
class Environment(Protocol):
    """One episode at a time; async, so that slow tools overlap generation.

    An environment's own failure is an outcome (error, timeout), never a reward of 0. A tool that answers
    nobody is ToolAway.
    """

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Strings that end a turn; they stay in the action."""
        ...

    async def reset(self, task: Task, seed: int) -> list[Message]: ...

    async def step(self, action: str) -> StepResult: ...

    async def close(self) -> None: ...
