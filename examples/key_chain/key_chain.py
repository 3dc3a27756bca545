"""The environment: doors in a row, each opened by a key; `environment.kind: key_chain:factory`.

The prompt names a kind of key and shows the keys of the first door. The key of that kind, copied word for
word, opens a door and reveals the keys of the next one: two in the first half of the doors, then one. After a
wrong key every door stays shut, but all turns are played, so what the tool answers shows whether the episode
can still be won. The reward is 1 if the last door opens, else 0. With keys of three words instead of ten:

    user:   Name 2 capital:
             currency Chad Nobelium Peru
             capital Korea Radon Sudan
    policy: <search> Korea Radon Sudan</search>
    tool:   1
             capital Chile Mexico Benin
    policy: <search> Chile Mexico Benin</search>       the last door opens: reward 1
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from megatron_stppo.base.types import Message, Task
from megatron_stppo.config import ConfigError, EnvironmentConfig
from megatron_stppo.environments.answers import MAX_ACTION, inside_last
from megatron_stppo.environments.base import StepResult

KINDS = ("capital", "currency", "neighbour", "discovery", "place", "number")
LENGTH = 10  # words of a key
SHUT = "\nno\n"
Room = Mapping[str, str]  # {kind: key} of a door, in the order in which they are shown


def task_row(
    generator: random.Random, words: Sequence[str], doors: int, split: str, index: int
) -> dict[str, Any]:
    """Return a task with this number of doors in the verl schema. Its rooms are in `extra_info.rooms`."""
    right, other = generator.sample(KINDS, 2)
    rooms = []
    for door in range(doors):
        shown = generator.sample((right, other), 2) if door < doors / 2 else [right]
        rooms.append({kind: " ".join(generator.sample(words, LENGTH)) for kind in shown})
    return {
        "data_source": f"key_chain_{doors}",
        "prompt": [{"role": "user", "content": f"Name {doors} {right}:{keys(rooms[0])}"}],
        "reward_model": {"style": "rule", "ground_truth": {"target": [room[right] for room in rooms]}},
        "extra_info": {"split": split, "index": index, "rooms": rooms},
    }


def task_rows(seed: int, words: Sequence[str], doors: int, split: str, size: int) -> Iterator[dict[str, Any]]:
    generator = random.Random(f"{seed}/{split}/{doors}")
    return (task_row(generator, words, doors, split, index) for index in range(size))


def keys(room: Room) -> str:
    return "".join(f"\n {kind} {key}" for kind, key in room.items())


def opened(left: int, room: Room) -> str:
    """Return what the tool answers to a right key: the number of doors that are left, and the next keys."""
    return f"\n{left}{keys(room)}\n"


def use(key: str) -> str:
    return f"<search> {key}</search>"


class KeyChain:
    """One episode: a turn per door."""

    stop_strings = ("</search>",)

    async def reset(self, task: Task, seed: int) -> list[Message]:
        """Return the task's prompt. Raises ConfigError for a row that task_row has not written."""
        rooms = task.extra.get("rooms")
        if not isinstance(rooms, list) or len(rooms) != len(task.targets):
            raise ConfigError(
                f"{task.data_source} row {task.index}: extra_info.rooms must have a room for each of "
                f"{len(task.targets)} targets; write the data with key_chain.task_row"
            )
        self._keys, self._rooms = task.targets, rooms
        self._turns = self._open = 0
        return list(task.prompt)

    async def step(self, action: str) -> StepResult:
        key = inside_last(action, "search") if len(action) <= MAX_ACTION else None
        self._open += self._open == self._turns and action == use(self._keys[self._turns])
        self._turns += 1
        right, left = self._open == self._turns, len(self._keys) - self._turns
        metrics = {"doors": float(self._open)}
        if left:
            text = opened(left, self._rooms[self._turns]) if right else SHUT
            return StepResult(text, 0.0, done=False, valid=key is not None, metrics=metrics)
        return StepResult(
            observation="",
            reward=float(right),
            done=True,
            valid=key is not None,
            outcome="ok" if right else "wrong",
            detail=f"{self._open} of {self._turns} doors",
            metrics=metrics,
        )

    async def close(self) -> None: ...


def factory(section: EnvironmentConfig) -> Callable[[], KeyChain]:
    """Return a function that makes one environment per episode."""
    return KeyChain
