"""What a user implements to bring a task of their own: reset, step, close."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from megatron_stppo.types import Message, Outcome, Task


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

    An environment's own failure is an outcome (error, timeout), never a reward of 0.
    """

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Strings that end a turn; they stay in the action."""
        ...

    async def reset(self, task: Task, seed: int) -> list[Message]: ...

    async def step(self, action: str) -> StepResult: ...

    async def close(self) -> None: ...
