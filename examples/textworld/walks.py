"""Scripted episodes: random walks, with commands that the game understands in the room where it is.

They teach the form of a turn, and that rooms name their exits and things. They do not teach the way: every
command is drawn anew, from all that are possible, `look` and the way back included.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from text_games import observed, opened


class Script:
    """Writes rows from walks of `turns` commands in games, each drawn from the games that are trained on."""

    def __init__(self, tasks: Sequence[dict[str, Any]], turns: int, seed: int) -> None:
        self._tasks, self._turns = tasks, turns
        self._rng = random.Random(f"{seed}/script")

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield rows, without end."""
        while True:
            task = self._rng.choice(self._tasks)
            segments = [{"text": text, "kind": kind} for text, kind in self._walk(task)]
            yield {"prompt": task["prompt"], "segments": segments, "stage": "skill"}

    def _walk(self, task: dict[str, Any]) -> list[tuple[str, str]]:
        game = opened(Path(task["extra_info"]["textworld"]["game"]), admissible_commands=True)
        state, segments = game.reset(), list[tuple[str, str]]()
        for _ in range(self._turns):
            command = self._rng.choice(state.admissible_commands)
            segments.append((f"<command> {command}</command>", "turn"))
            state, _, done = game.step(command)
            if done:
                break
            segments.append((observed(state), "observation"))
        game.close()
        return segments if segments[-1][1] == "turn" else segments[:-1]
