"""Reads tasks in the verl schema from .jsonl or .parquet files, and iterates over them with a cursor whose
position can be saved and restored.

A row: {"data_source", "prompt": [{"role", "content"}], "ability", "reward_model": {"style": "rule",
"ground_truth": {"target": [..]}}, "extra_info": {"split", "index"}}. The files of Search-R1 can be used
unchanged. A null is a missing key, except within a list, and within `extra_info` and messages of a .jsonl
file. All values are converted to those of JSON (values.py).
"""

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megatron_stppo.base.printing import one_line
from megatron_stppo.base.types import Message, Task
from megatron_stppo.config import ConfigError
from megatron_stppo.data.values import jsonl_rows, plain, without_nulls, wrong

ROLES = ("system", "developer", "user", "assistant", "tool")


def read(path: Path) -> tuple[Task, ...]:
    """Return all tasks of a file. Raises ConfigError, whose message names file, row (from 1), field and
    remedy."""
    if path.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(f"data={path}: has {path.suffix or 'no'} suffix; give a .jsonl or .parquet file")
    try:
        rows = _parquet(path) if path.suffix == ".parquet" else jsonl_rows(path, "data")
        tasks = tuple(_task(row, where, index) for index, (where, row) in enumerate(rows))
    except (OSError, pa.ArrowException) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"data={path}: cannot be read ({reason}); give a .jsonl or .parquet file") from None
    if not tasks:
        raise ConfigError(f"data={path}: holds no rows; give at least one task")
    return tasks


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    with pq.ParquetFile(path) as file:
        number = 0
        for batch in file.iter_batches(batch_size=1024):
            for row in _rows(batch, path, number):
                number += 1
                yield f"{path} row {number}", row


def _rows(batch: pa.RecordBatch, path: Path, before: int) -> list[Any]:
    """Return the rows with Python's values, without nulls. before: the number of rows before the batch."""
    try:
        return [without_nulls(row) for row in batch.to_pylist(maps_as_pydicts="strict")]
    except (ValueError, KeyError, OverflowError) as error:  # nanoseconds, the year 10000, a key given twice
        rows = f"rows {before + 1} to {before + len(batch)}"
        raise ConfigError(
            f"{path} {rows}: hold a value that cannot be read ({one_line(str(error))}); write it as text"
        ) from None


def _task(row: Any, where: str, number: int) -> Task:
    """Return the task of a row. `number` is the row's index, from 0."""
    if not isinstance(row, dict):
        raise ConfigError(
            f"{where}: is {type(row).__name__}, not an object; give the fields of the verl schema"
        )
    extra = row.get("extra_info")
    if not isinstance(extra, dict | None):
        raise wrong(where, "extra_info", extra, 'give an object such as {"split": "train", "index": 0}')
    rest = plain(extra or {}, where, "extra_info")
    split, index = rest.pop("split", None), rest.pop("index", None)
    if not isinstance(split, str | None):
        raise wrong(where, "extra_info.split", split, "give text")
    if isinstance(index, bool) or not isinstance(index, int | None):
        raise wrong(where, "extra_info.index", index, "give a whole number")
    source = plain(row.get("data_source"), where, "data_source")
    if not isinstance(source, str) or not source:
        raise wrong(where, "data_source", source, "name the data set the row is from")
    ability = plain(row.get("ability"), where, "ability")
    return Task(
        source,
        _prompt(row.get("prompt"), where),
        _targets(row.get("reward_model"), where),
        split or "",
        number if index is None else index,
        rest | ({"ability": ability} if ability is not None else {}),
    )


def _prompt(given: Any, where: str) -> tuple[Message, ...]:
    if not isinstance(given, list) or not given:
        raise wrong(where, "prompt", given, 'give a list such as [{"role": "user", "content": ".."}]')
    return tuple(_message(message, where, f"prompt[{i}]") for i, message in enumerate(given))


def _message(given: Any, where: str, field: str) -> Message:
    """Return a message. That of a tool may be empty, and that of an assistant which has another key."""
    if not isinstance(given, dict):
        raise wrong(where, field, given, "give an object with role and content")
    message = Message.of(plain(given, where, field))
    if message.role not in ROLES:
        raise wrong(where, f"{field}.role", message.role, f"choose from {', '.join(ROLES)}")
    others = any(value is not None for value in message.extra.values())
    empty_is_right = message.role == "tool" or (message.role == "assistant" and others)
    text = message.content
    if not isinstance(text, str) or not (text.strip() or empty_is_right):
        raise wrong(where, f"{field}.content", given.get("content"), "give non-empty text")
    return message


def _targets(reward_model: Any, where: str) -> tuple[str, ...]:
    """Return the accepted answers of a row.

    ground_truth may be {"target": ..} or the target itself. A target is a string or a list of strings.
    """
    remedy = 'give {"style": "rule", "ground_truth": {"target": ["accepted answer"]}}'
    if not isinstance(reward_model, dict):
        raise wrong(where, "reward_model", reward_model, remedy)
    truth = reward_model.get("ground_truth")
    target = truth.get("target") if isinstance(truth, dict) else truth
    targets = [target] if isinstance(target, str) else target
    if not isinstance(targets, list) or not targets:
        raise wrong(where, "reward_model.ground_truth", truth, remedy)
    for text in targets:
        if not isinstance(text, str) or not text.strip():
            raise wrong(where, "reward_model.ground_truth.target", text, "give non-empty text")
    return tuple(plain(targets, where, "reward_model"))


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
        first, self._position = self._position, self._position + n
        order = self._order()
        while self._position >= len(self._tasks):
            self._epoch, self._position = self._epoch + 1, self._position - len(self._tasks)
            order += self._order()
        return [self._tasks[i] for i in order[first : first + n]]

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
                    "resume with the same data.train, rollout.max_prompt_tokens and run.seed, or start a new "
                    "run"
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
