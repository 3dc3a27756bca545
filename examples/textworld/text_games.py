"""The environment: a game of the package textworld, `environment.kind: text_games:factory`.

The policy writes <command>go north</command>, with any text before it, and reads what the game says. The
reward is 1 at the end of a game that is won; with `text_games:quest_steps` it is given in equal parts for the
steps of the quest, as they are made, and taken back when they are undone. make_games.py compiles the games.

A game's interpreter is C code in this process, with commands that write files or end the game. So a command
must begin with a verb of the game's own grammar, and consist of words of this grammar and of the game's
names.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_stppo.base.printing import one_line
from megatron_stppo.base.types import Message, Task
from megatron_stppo.config import ConfigError, EnvironmentConfig
from megatron_stppo.environments.answers import MAX_ACTION, inside_last
from megatron_stppo.environments.base import StepResult

KIND = "textworld"
MAX_COMMAND = 100  # characters
WORD = re.compile(r"[a-z0-9'-]+")  # without what separates commands
REFUSED = "\n\nThat is not a command of this game.\n\n"


class TextGame:
    """One episode, in a game of its own: turns until it is won or lost, or `max_turns` were taken.

    Example: reset(task), then step("<command> take coin</command>").
    """

    stop_strings = ("</command>",)

    def __init__(self, max_turns: int, quest_steps: bool) -> None:
        """quest_steps: whether steps of the quest are rewarded, or only the end."""
        self._max_turns, self._quest_steps = max_turns, quest_steps
        self._game: Any = None

    async def reset(self, task: Task, seed: int) -> list[Message]:
        """Return the task's prompt. Raises ConfigError for a row that make_games.py has not written."""
        row = task.extra.get(KIND)
        if not isinstance(row, dict) or not isinstance(row.get("game"), str):
            raise ConfigError(
                f"{task.data_source} row {task.index}: extra_info.{KIND}.game is missing; write the data "
                "with make_games.py"
            )
        await self.close()
        self._game = opened(Path(row["game"]), policy_commands=self._quest_steps)
        self._state = self._game.reset()
        self._grammar = Grammar(self._state)
        self._turns, self._left = 0, len(self._state.policy_commands or ())
        self._quest = self._left
        return list(task.prompt)

    async def step(self, action: str) -> StepResult:
        self._turns += 1
        command = self._grammar.command(action)
        observation, progress = REFUSED, 0.0
        if command is not None:
            self._state, _, _ = self._game.step(command)
            observation, progress = observed(self._state), self._progress()
        won, lost = bool(self._state.won), bool(self._state.lost)
        done = won or lost or self._turns >= self._max_turns
        return StepResult(
            observation="" if done else observation,
            reward=progress if self._quest_steps else float(won),
            done=done,
            valid=command is not None,
            outcome=("ok" if won else "wrong" if lost else "truncated") if done else None,
            detail=one_line(command or ""),
            metrics={"turns": self._turns, "score": (self._state.score or 0) / self._state.max_score},
        )

    def _progress(self) -> float:
        """Return by which part of the quest its rest became shorter; negative if it became longer."""
        before = self._left
        if self._state.won:
            self._left = 0
        elif self._state.policy_commands:  # empty after a mistake that cannot be made good
            self._left = len(self._state.policy_commands)
        return (before - self._left) / self._quest if self._quest else 0.0

    async def close(self) -> None:
        if self._game is not None:
            self._game.close()
            self._game = None


class Grammar:
    """The verbs and the words of a game's commands. Example: "go", "take"; "north", "coin", "from"."""

    def __init__(self, state: Any) -> None:
        texts = [*state.command_templates, *state.entities]
        self._verbs = frozenset(state.verbs)
        self._words = frozenset(
            word for text in texts for word in text.lower().split() if WORD.fullmatch(word)
        )

    def command(self, action: str) -> str | None:
        """Return the command in the policy's text, or None if it has none in the words of this grammar.

        Example: "I see a door. <command> go  North</command>" gives "go north".
        """
        text = inside_last(action, "command") if len(action) <= MAX_ACTION else None
        if text is None or len(text) > MAX_COMMAND:
            return None
        words = text.lower().split()
        is_known = bool(words) and words[0] in self._verbs and self._words.issuperset(words)
        return " ".join(words) if is_known else None


def observed(state: Any) -> str:
    """Return what the policy reads in a state of a game."""
    return f"\n\n{room_text(state.feedback)}\n\n"


def room_text(feedback: str) -> str:
    """Return what the game says, on one line, without banner, objective, prompt and status line.

    Example: "..\\n-= Attic =-\\nYou are in an attic.\\n\\n>   -= Attic =-0/1" gives
    "-= Attic =- You are in an attic."
    """
    text = feedback.rpartition("\n>")[0] or feedback
    return " ".join(text[max(text.find("-= "), 0) :].split())


def opened(path: Path, **requested: bool) -> Any:
    """Return the game, to be reset. requested: fields of textworld.EnvInfos.

    Raises ConfigError if there is no such game, or no package textworld.
    """
    package = _package()
    if not path.is_file() or not path.with_suffix(".json").is_file():
        raise ConfigError(f"extra_info.{KIND}.game={path}: no such game; compile it with make_games.py")
    game = package.start(str(path), package.EnvInfos(**requested))
    game.seed(1)
    return game


def factory(section: EnvironmentConfig) -> Callable[[], TextGame]:
    """Return a function that makes one environment per episode, with the reward at the end.

    Raises ConfigError if the package is not installed.
    """
    _package()
    return lambda: TextGame(section.max_turns, quest_steps=False)


def quest_steps(section: EnvironmentConfig) -> Callable[[], TextGame]:
    """The same with a reward for each step of the quest. They sum to 1 if the game is won."""
    _package()
    return lambda: TextGame(section.max_turns, quest_steps=True)


@functools.cache
def _package() -> ModuleType:
    try:
        return importlib.import_module("textworld")  # optional, and slow to import
    except ImportError as error:
        raise ConfigError(
            f"text_games: the package textworld cannot be imported ({error}); pip install textworld"
        ) from None
