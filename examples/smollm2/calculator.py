"""The environment: word problems with a calculator. A turn is a line: `calc: 48+50*3` or `answer: 198`."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

from megatron_stppo.base.types import Message, Task
from megatron_stppo.config import EnvironmentConfig
from megatron_stppo.environments.base import Environment, StepResult

INSTRUCTION = "Write calc: expression, then answer: number."
CALL = re.compile(r"calc:(.*)\n+")
ANSWER = re.compile(r"answer:(.*)\n+")
EXPRESSION = re.compile(r"[0-9]{1,6}(?: ?[-+*/] ?[0-9]{1,6}){1,3}")


def compute(text: str) -> str | None:
    """Return the value of an expression of whole numbers, exactly; None if it is not one.

    Products and quotients before sums. Example: "48+50*3" gives "198", "7/2" gives "3.5", "1/0" gives None.
    """
    text = text.strip()
    if not EXPRESSION.fullmatch(text):
        return None
    total, sign = Fraction(0), 1
    for part in re.split(r"([-+])", text):
        if part in ("+", "-"):
            sign = 1 if part == "+" else -1
            continue
        number, *others = re.split(r"([*/])", part)
        value = Fraction(int(number))
        for operator, operand in zip(others[::2], others[1::2], strict=True):
            if operator == "/" and int(operand) == 0:
                return None
            value = value * int(operand) if operator == "*" else value / int(operand)
        total += sign * value
    return str(total) if total.denominator == 1 else f"{float(total):.6g}"


class Calculator:
    """One episode: up to `turns` turns; the reward is 1 for the right answer, else 0."""

    stop_strings = ("\n",)

    def __init__(self, turns: int) -> None:
        self.left = turns

    async def reset(self, task: Task, seed: int) -> list[Message]:
        self.target, self.calls = task.targets[0], 0
        return list(task.prompt)

    async def step(self, action: str) -> StepResult:
        self.left -= 1
        call, answer = CALL.fullmatch(action), ANSWER.fullmatch(action)
        if answer is not None:
            given = answer[1].strip()
            return self.end(given == self.target, True, given[:20])
        if self.left <= 0:
            return self.end(False, False, "no answer")
        value = None if call is None else compute(call[1])
        self.calls += value is not None
        shown = "error" if value is None else value
        return StepResult(f"= {shown}\n", 0.0, False, value is not None, int(value is not None))

    def end(self, right: bool, valid: bool, detail: str) -> StepResult:
        outcome, calls = "ok" if right else "wrong", {"calls": float(self.calls)}
        return StepResult("", float(right), True, valid, 0, outcome, detail, metrics=calls)

    async def close(self) -> None: ...


def factory(section: EnvironmentConfig) -> Callable[[], Environment]:
    return lambda: Calculator(section.max_turns)
