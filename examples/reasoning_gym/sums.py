"""Scripted episodes of chain sums: add the terms one after another, or guess.

Most demonstrations write every partial sum. In the last tenth 70 % of the answers are guesses without one.
The cold start teaches how to add; reinforcement learning teaches to do it instead of guessing.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from typing import Any

from gym_tasks import RETRY, task_rows
from trajectories import GUESS_SHARE

SETTINGS = {"min_terms": 5, "max_terms": 8, "min_digits": 1, "max_digits": 1}
RETRY_SHARE = 0.2  # of the skill stage's rows: the first answer is a guess, and is corrected
CHUNK = 4096  # tasks made at a time


def working(question: str) -> str:
    """Return the turn that adds the terms of a question one after another.

    Example: "...: 4 - 3 + 8 =" gives " 4 - 3 = 1\\n 1 + 8 = 9\\n<answer> 9</answer>".
    """
    first, *rest = re.findall(r"[-+] \d+|\d+", question.partition(":")[2])
    total, lines = int(first), []
    for term in rest:
        after = total + int(term.replace(" ", ""))
        lines.append(f" {total} {term} = {after}\n")
        total = after
    return f"{''.join(lines)}{answer(total)}"


def answer(total: int) -> str:
    return f"<answer> {total}</answer>"


GUESSES = tuple(answer(total) for total in range(-20, 31))


class Script:
    """Writes rows from tasks of its own seed, without the questions that are trained on or held out."""

    def __init__(self, seed: int, taken: frozenset[str]) -> None:
        self._questions = _questions(seed, taken)
        self._rng = random.Random(f"{seed}/script")

    def rows(self, stage: str) -> Iterator[dict[str, Any]]:
        """Yield rows of a stage, without end."""
        for question in self._questions:
            yield {
                "prompt": [{"role": "user", "content": question}],
                "segments": [{"text": text, "kind": kind} for text, kind in self._episode(question, stage)],
                "stage": stage,
            }

    def _episode(self, question: str, stage: str) -> list[tuple[str, str]]:
        segments: list[tuple[str, str]] = []
        share = GUESS_SHARE if stage == "policy" else RETRY_SHARE
        if self._rng.random() < share:
            segments = [(self._wrong(question), "turn"), (RETRY, "observation")]
            if stage == "policy" and self._rng.random() < share:
                return [*segments, (self._wrong(question), "turn")]
        return [*segments, (working(question), "turn")]

    def _wrong(self, question: str) -> str:
        return self._rng.choice([text for text in GUESSES if text not in working(question)])


def _questions(seed: int, taken: frozenset[str]) -> Iterator[str]:
    for chunk in itertools.count():
        for row in task_rows("chain_sum", "", CHUNK, seed + chunk * CHUNK, instruction="", **SETTINGS):
            question = str(row["prompt"][0]["content"])
            if question not in taken:
                yield question
