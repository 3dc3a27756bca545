"""Reads tasks in the verl schema from .jsonl or .parquet files, and iterates over them with a cursor whose
position can be saved and restored.

A row: {"data_source", "prompt": [{"role", "content"}], "ability", "reward_model": {"style": "rule",
"ground_truth": {"target": [..]}}, "extra_info": {"split", "index"}}. The files of Search-R1 can be used
unchanged.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megatron_stppo.config import ConfigError
from megatron_stppo.data import jsonl
from megatron_stppo.types import Message, Task

ROLES = ("system", "user", "assistant")


def read(path: Path) -> tuple[Task, ...]:
    """Return all tasks of a file. Raises ConfigError, whose message names file, row (from 1), field and
    remedy."""
    readers = {".jsonl": _jsonl, ".parquet": _parquet}
    if path.suffix not in readers:
        raise ConfigError(f"data={path}: has {path.suffix or 'no'} suffix; give a .jsonl or .parquet file")
    try:
        tasks = tuple(
            _task(row, where, index) for index, (where, row) in enumerate(readers[path.suffix](path))
        )
    except (OSError, pa.ArrowException) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"data={path}: cannot be read ({reason}); give a .jsonl or .parquet file") from None
    if not tasks:
        raise ConfigError(f"data={path}: holds no rows; give at least one task")
    return tasks


def _jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    return jsonl.rows(path, "data")


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    with pq.ParquetFile(path) as file:
        number = 0
        for batch in file.iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                number += 1
                yield f"{path} row {number}", row


def _task(row: Any, where: str, number: int) -> Task:
    """Return the task of a row. `number` is the row's index, from 0."""
    if not isinstance(row, dict):
        raise ConfigError(
            f"{where}: is {type(row).__name__}, not an object; give the fields of the verl schema"
        )
    extra = row.get("extra_info") or {}
    if not isinstance(extra, dict):
        raise _wrong(where, "extra_info", extra, 'give an object such as {"split": "train", "index": 0}')
    split, index = extra.get("split", ""), extra.get("index", number)
    if isinstance(index, bool) or not isinstance(index, int):
        raise _wrong(where, "extra_info.index", index, "give a whole number")
    source = row.get("data_source")
    if not isinstance(source, str) or not source:
        raise _wrong(where, "data_source", source, "name the data set the row is from")
    rest = {key: value for key, value in extra.items() if key not in ("split", "index")}
    ability = row.get("ability")
    task = Task(
        source,
        _prompt(row.get("prompt"), where),
        _targets(row.get("reward_model"), where),
        str(split),
        index,
        rest | ({"ability": ability} if ability is not None else {}),
    )
    others = {"data_source": source, "reward_model": task.targets, "extra_info": extra, "ability": ability}
    for field, value in others.items():
        _check_sendable(value, where, field)
    return task


def _prompt(given: Any, where: str) -> tuple[Message, ...]:
    if not isinstance(given, list) or not given:
        raise _wrong(where, "prompt", given, 'give a list such as [{"role": "user", "content": ".."}]')
    for position, message in enumerate(given):
        field = f"prompt[{position}]"
        if not isinstance(message, dict):
            raise _wrong(where, field, message, "give an object with role and content")
        if message.get("role") not in ROLES:
            raise _wrong(where, f"{field}.role", message.get("role"), f"choose from {', '.join(ROLES)}")
        if not isinstance(message.get("content"), str) or not message["content"].strip():
            raise _wrong(where, f"{field}.content", message.get("content"), "give non-empty text")
        if not message["content"].isascii():
            _check_encodable(message["content"], where, f"{field}.content")
    return tuple(Message(message["role"], message["content"]) for message in given)


def _check_encodable(text: str, where: str, field: str) -> None:
    """Raise ConfigError for an unpaired surrogate, which JSON can contain but UTF-8 cannot encode."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _wrong(where, field, text[error.start], "remove the unpaired surrogate") from None


def _check_sendable(value: Any, where: str, field: str) -> None:
    """Raise ConfigError for text or a number that ranks cannot send each other: an integer has 64 bits."""
    if isinstance(value, str):
        _check_encodable(value, where, field)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise _wrong(where, field, value, "give an integer of at most 64 bits, or text")
    elif isinstance(value, Mapping):
        for key, part in value.items():
            _check_sendable(key, where, field)
            _check_sendable(part, where, f"{field}.{key}")
    elif isinstance(value, list | tuple):
        for part in value:
            _check_sendable(part, where, field)


def _targets(reward_model: Any, where: str) -> tuple[str, ...]:
    """Return the accepted answers of a row.

    ground_truth may be {"target": ..} or the target itself. A target is a string or a list of strings.
    """
    remedy = 'give {"style": "rule", "ground_truth": {"target": ["accepted answer"]}}'
    if not isinstance(reward_model, dict):
        raise _wrong(where, "reward_model", reward_model, remedy)
    truth = reward_model.get("ground_truth")
    target = truth.get("target") if isinstance(truth, dict) else truth
    targets = [target] if isinstance(target, str) else target
    if not isinstance(targets, list) or not targets:
        raise _wrong(where, "reward_model.ground_truth", truth, remedy)
    for text in targets:
        if not isinstance(text, str) or not text.strip():
            raise _wrong(where, "reward_model.ground_truth.target", text, "give non-empty text")
    return tuple(targets)


def _wrong(where: str, field: str, value: Any, remedy: str) -> ConfigError:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return ConfigError(f"{where}: {field}={shown} is missing or malformed; {remedy}")


def shared(train: Iterable[Task], evaluate: Iterable[Task]) -> int:
    """Return how many tasks of `evaluate` have the source, prompt and targets of exactly one task of `train`.

    Not compared: split, index and the other fields, which differ between copies of a task. Tasks of `train`
    that are equal in these three differ in another field, as tasks of agents do. They do not count.
    """
    known = Counter((task.data_source, task.prompt, task.targets) for task in train)
    return sum(known[task.data_source, task.prompt, task.targets] == 1 for task in evaluate)


class TaskCursor:
    """Iterates over the tasks, epoch after epoch. The order of an epoch depends only on the seed and its
    number.

    Example: with 3 tasks, take(2) and take(2) return the three of the first epoch and one of the second.
    """

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        if not tasks:
            raise ValueError("tasks: none given; a cursor needs at least one")
        self._tasks, self._seed = tuple(tasks), seed
        self._epoch, self._position = 0, 0

    def take(self, n: int) -> list[Task]:
        """Return the next n >= 0 tasks."""
        taken: list[Task] = []
        while len(taken) < n:
            order = self._order()
            until = min(len(order), self._position + n - len(taken))
            taken += [self._tasks[i] for i in order[self._position : until]]
            self._epoch, self._position = (
                (self._epoch + 1, 0) if until == len(order) else (self._epoch, until)
            )
        return taken

    def state(self) -> dict[str, int]:
        """Return the position as a JSON-serialisable dict.

        restore() with it, in a cursor over the same tasks, continues the sequence.
        """
        return {
            "seed": self._seed,
            "tasks": len(self._tasks),
            "epoch": self._epoch,
            "position": self._position,
        }

    def restore(self, state: dict[str, int]) -> None:
        """Continue from a position that state() returned.

        Raises ConfigError if it belongs to another number of tasks or another seed.
        """
        for name, now in (("seed", self._seed), ("tasks", len(self._tasks))):
            if state[name] != now:
                raise ConfigError(
                    f"task cursor: {name} is {now} now and {state[name]} in the checkpoint; "
                    "resume with the same data.train and run.seed, or start a new run"
                )
        self._epoch, self._position = state["epoch"], state["position"]

    def after(self, state: dict[str, int], n: int) -> dict[str, int]:
        """Return the state of a cursor that takes n tasks from `state`. This cursor is not moved."""
        epochs, position = divmod(state["position"] + n, len(self._tasks))
        return state | {"epoch": state["epoch"] + epochs, "position": position}

    def _order(self) -> list[int]:
        order = list(range(len(self._tasks)))
        # random hashes a string seed in the same way on every machine and in every Python version.
        random.Random(f"{self._seed}/{self._epoch}").shuffle(order)
        return order
