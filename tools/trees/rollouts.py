"""The rollouts of benchmark_trees: episodes of a search agent, recorded; others drawn with a fixed seed.

search: the 32 episodes of iteration 28 of examples/smollm2/search.yaml with run.iterations=30, one of each
    question; about 167 tokens each. Their system prompt is "Write search: words, then answer: words."
instructed: the same, in which INSTRUCTION (211 tokens) stands before that sentence, as in the system prompts
    of other search agents.
bfcl: multi-turn function calling with the sizes of BFCL's base category: system prompt and tools have 3,594
    of about 4,456 tokens. Tasks have one of two sets of tools, in turn: the first 394 tokens are common to
    all tasks, and the next 3,200 to the tasks of one set. The eight samples of a task have the same first
    message of the user (40 to 80 tokens) and differ from the first call on. There are 3 to 5 turns of 30 to
    90 tokens, and 120 to 250 tokens of results and of the user's next message after each but the last.
compacting: an agent that summarises its history three times. The prompt of the first history is the system
    prompt with tools (900 tokens, the same in all tasks) and the task (100); then there are four turns (40 to
    60 tokens) with results (80 to 120). The last turn of a history that is compacted is the summary (120).
    The next history begins with system prompt, task and this summary, and has four turns of its own. A fifth
    history continues the second after two of its turns in another way, as when a step is tried again. Four
    samples of each task.

Turns begin with the same five tokens, the opening of a call. All other drawn tokens are random.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_stppo.base.types import Branch, Task, Trajectory, Turn

RECORDED = Path(__file__).parent / "search.json.gz"
DRAWN = 4096  # drawn tokens are below this
SYSTEM = 3  # tokens of a recorded prompt before the text of the system prompt
OPENING = (1, 2, 3, 4, 5)
INSTRUCTION = """You answer questions with the help of a search engine. You may call one or more functions to
assist with the question. You are given the signature of the function within <tools></tools>:
<tools>
{"type": "function", "function": {"name": "search", "description": "Search for sentences about the words and
return the three best ones, each on a line of its own.", "parameters": {"type": "object", "properties":
{"words": {"type": "string", "description": "The words to search for: a relation, and one name."}},
"required": ["words"]}}}
</tools>
For each call, write one line with the words. A question may need several searches, one after another: search
for the thing that is described first, and use its name in the next search. Do not repeat a search. When the
results have the answer, write it as short as possible, without a sentence around it.
"""


def trajectories(case: str, tasks: int = 0) -> list[Trajectory]:
    """Return the histories of the episodes of a case. tasks: of a case that is drawn; 0: 4 or 2 of them."""
    return [history for episode in CASES[case](tasks) for history in episode.histories()]


def renumbered(played: Sequence[Trajectory]) -> list[Trajectory]:
    """Return the trajectories with the tokens that they have numbered from 0: equal ones stay equal.

    So a tiny model needs no large vocabulary, whose head would take most of its time.
    """
    number = {token: n for n, token in enumerate(sorted({x for one in played for x in one.token_ids}))}

    def of(ids: Sequence[int]) -> tuple[int, ...]:
        return tuple(number[token] for token in ids)

    return [
        replace(
            one,
            prompt_ids=of(one.prompt_ids),
            turns=tuple(
                replace(turn, token_ids=of(turn.token_ids), observation_ids=of(turn.observation_ids))
                for turn in one.turns
            ),
        )
        for one in played
    ]


def _recorded(with_instruction: bool) -> list[Trajectory]:
    """Return the recorded episodes. Four groups of eight, as algorithms that compare a group need them."""
    found = json.loads(gzip.decompress(RECORDED.read_bytes()))
    more = found["instruction"] if with_instruction else []
    return [
        _episode(
            n // 8,
            [*prompt[:SYSTEM], *more, *prompt[SYSTEM:]],
            [_turn(ids, observed, reward) for ids, observed, reward in turns],
        )
        for n, (prompt, turns) in enumerate(found["episodes"])
    ]


def _bfcl(tasks: int) -> list[Trajectory]:
    draw = Draw()
    system, tools, episodes = draw(394), [draw(3200) for _ in range(2)], list[Trajectory]()
    for task in range(tasks or 4):
        prompt = [*system, *tools[task % 2], *draw(40, 80)]
        for _ in range(8):
            count = draw.number(3, 5)
            turns = [_turn(draw.action(30, 90), draw(120, 250)) for _ in range(count - 1)]
            last = _turn(draw.action(30, 90), (), float(draw.number(0, 1)))
            episodes.append(_episode(task, prompt, [*turns, last]))
    return episodes


def _compacting(tasks: int) -> list[Trajectory]:
    draw = Draw()
    system, episodes = draw(900), list[Trajectory]()

    def turns(count: int) -> list[Turn]:
        return [_turn(draw.action(40, 60), draw(80, 120)) for _ in range(count)]

    for number in range(tasks or 2):
        task = [*system, *draw(100)]
        for _ in range(4):
            reward, prompt, histories = float(draw.number(0, 1)), task, list[tuple[Any, list[Turn]]]()
            for _ in range(3):
                summary = draw(120)
                histories.append((prompt, [*turns(4), _turn(summary, (), reward)]))
                prompt = [*task, *summary]
            histories.append((prompt, [*turns(4), _turn(draw.action(40, 60), (), reward)]))
            second, done = histories[1]
            kept = [token for turn in done[:2] for token in (*turn.token_ids, *turn.observation_ids)]
            histories.append(([*second, *kept], [*turns(2), _turn(draw.action(40, 60), (), reward)]))
            branches = tuple(Branch(tuple(prompt), tuple(turns)) for prompt, turns in histories[1:])
            episodes.append(_episode(number, *histories[0], branches))
    return episodes


CASES: dict[str, Callable[[int], list[Trajectory]]] = {
    "search": lambda tasks: _recorded(False),
    "instructed": lambda tasks: _recorded(True),
    "bfcl": _bfcl,
    "compacting": _compacting,
}


class Draw:
    """Random tokens with a fixed seed."""

    def __init__(self) -> None:
        self._random = random.Random(0)

    def number(self, low: int, high: int) -> int:
        return self._random.randint(low, high)

    def __call__(self, low: int, high: int | None = None) -> list[int]:
        """Return `low` tokens, or from low to high."""
        count = self.number(low, high or low)
        return [self._random.randrange(len(OPENING) + 1, DRAWN) for _ in range(count)]

    def action(self, low: int, high: int) -> list[int]:
        return [*OPENING, *self(low - len(OPENING), high - len(OPENING))]


def _turn(ids: Sequence[int], observed: Sequence[int], reward: float = 0.0) -> Turn:
    return Turn(tuple(ids), (-1.0,) * len(ids), tuple(observed), reward, ((0, len(ids)),))


def _episode(
    group: int, prompt: Sequence[int], turns: Sequence[Turn], branches: tuple[Branch, ...] = ()
) -> Trajectory:
    task = Task("trees", (), ("",), "train", group)
    return Trajectory(task, tuple(prompt), tuple(turns), "ok", group, branches=branches)
