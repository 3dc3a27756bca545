"""The environment: word problems with a calculator. A turn is a line: `calc: 48+50*3` or `answer: 198`.

In the long form (`reasoned`), anything may stand in the line before it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

from megatron_stppo.base.types import Message, Task
from megatron_stppo.config import EnvironmentConfig
from megatron_stppo.environments.base import Environment, StepResult

INSTRUCTION = "Write calc: expression, then answer: number."
REASONED = (
    "Think in one line, and end it with calc: expression. Then think again, and end with answer: number."
)
CALL, ANSWER = (re.compile(rf"(.*\s|){name}:(.*)\n+") for name in ("calc", "answer"))
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

    def __init__(self, turns: int, reasoned: bool = False) -> None:
        self.left, self.reasoned = turns, reasoned

    async def reset(self, task: Task, seed: int) -> list[Message]:
        self.target, self.calls = task.targets[0], 0
        return list(task.prompt)

    async def step(self, action: str) -> StepResult:
        self.left -= 1
        call, answer = (self.read(form, action) for form in (CALL, ANSWER))
        if answer is not None:
            given = answer.strip()
            return self.end(given == self.target, True, given[:20])
        if self.left <= 0:
            return self.end(False, False, "no answer")
        value = None if call is None else compute(call)
        self.calls += value is not None
        shown = "error" if value is None else value
        return StepResult(f"= {shown}\n", 0.0, False, value is not None, int(value is not None))

    def read(self, form: re.Pattern[str], action: str) -> str | None:
        """Return what stands behind the last `calc:` or `answer:` of a line, or None."""
        found = form.fullmatch(action)
        return found[2] if found and (self.reasoned or not found[1]) else None

    def end(self, right: bool, valid: bool, detail: str) -> StepResult:
        outcome, calls = "ok" if right else "wrong", {"calls": float(self.calls)}
        return StepResult("", float(right), True, valid, 0, outcome, detail, metrics=calls)

    async def close(self) -> None: ...


def factory(section: EnvironmentConfig) -> Callable[[], Environment]:
    return lambda: Calculator(section.max_turns)


def reasoned(section: EnvironmentConfig) -> Callable[[], Environment]:
    return lambda: Calculator(section.max_turns, reasoned=True)
