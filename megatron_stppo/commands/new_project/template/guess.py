"""The environment: the policy guesses a digit, and every wrong guess is answered with a hint."""

from collections.abc import Callable

from megatron_stppo.base.types import Message, Task
from megatron_stppo.config import EnvironmentConfig
from megatron_stppo.environments.base import Environment, StepResult

DIGITS = tuple("0123456789")


def reward(right: bool, guesses: int) -> float:
    """The reward of an episode that is over. To train something else, change this function alone."""
    return 1.0 if right else 0.0


class GuessTheDigit:
    """One episode. The digit is the task's target."""

    stop_strings = DIGITS  # end a turn, and stay in the action

    def __init__(self, max_turns: int) -> None:
        self._max_turns = max_turns

    async def reset(self, task: Task, seed: int) -> list[Message]:
        self._digit, self._turns = int(task.targets[0]), 0
        return list(task.prompt)

    async def step(self, action: str) -> StepResult:
        self._turns += 1
        valid = action.endswith(DIGITS)
        right = valid and int(action[-1]) == self._digit
        if right or self._turns == self._max_turns:
            return StepResult(
                observation="",
                reward=reward(right, self._turns),
                done=True,
                valid=valid,
                outcome="ok" if right else "wrong",
                detail=action[-1:],
                metrics={"guesses": self._turns},  # metrics.jsonl gets the mean as environment/guesses
            )
        hint = "a digit?" if not valid else "higher" if int(action[-1]) < self._digit else "lower"
        return StepResult(f" {hint} ", 0.0, done=False, valid=valid)

    async def close(self) -> None: ...


def factory(section: EnvironmentConfig) -> Callable[[], Environment]:
    """What `environment.kind: guess:factory` names; called once, with the section `environment`."""
    return lambda: GuessTheDigit(section.max_turns)
