"""Checks that a run trained on the tasks that were drawn, each exactly as often as without a disturbance."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_stppo.checkpoint import step_folder
from megatron_stppo.config import Config
from megatron_stppo.data import tasks
from megatron_stppo.data.tasks import TaskCursor

Key = tuple[str, str, int]  # data source, split, index


def check(config: Config) -> int:
    """Return on how many tasks the complete run has trained.

    Raises AssertionError unless it has trained on each as often as it was drawn, and its metrics describe the
    same episodes.
    """
    run, n = config.run, config.run.iterations
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").open()]
    found, first = [row["iteration"] for row in rows], 0 if run.evaluate_every else 1
    assert found == list(range(first, n + 1)), f"iterations in metrics.jsonl: {found}"
    for row in rows[-n:]:
        check_row(row, played(config, row["iteration"]))
    trained = [trained_on(config, iteration) for iteration in range(1, n + 1)]
    {"admission": in_order, "completion": all_but_open}[config.serving.order](config, trained)
    return sum(map(len, trained))


def check_row(row: dict[str, Any], episodes: Sequence[dict[str, Any]]) -> None:
    """Raise AssertionError unless an iteration's metrics are those of these episodes."""
    counts = {name: count for name, count in row.items() if name.startswith("outcome/")}
    own = Counter(f"outcome/{episode['outcome']}" for episode in episodes)
    assert Counter(counts) == own, f"iteration {row['iteration']}: {counts} in metrics.jsonl, played: {own}"
    mean = sum(episode["reward"] for episode in episodes) / len(episodes)
    assert abs(row["reward/mean"] - mean) < 1e-6, (row["iteration"], row["reward/mean"], mean)


def in_order(config: Config, trained: Sequence[Sequence[Key]]) -> None:
    """Every iteration trained on the tasks that a colocated run draws for it."""
    cursor, batch = _cursor(config), config.rollout.tasks_per_iteration
    for iteration, found in enumerate(trained, 1):
        expected = [_key_of(task) for task in cursor.take(batch)]
        assert found == expected, f"iteration {iteration} trained on {found}, drawn were {expected}"


def all_but_open(config: Config, trained: Sequence[Sequence[Key]]) -> None:
    """Every task was trained on once, except those that the last checkpoint has open. All must differ."""
    batch, n, bound = config.rollout.tasks_per_iteration, config.run.iterations, config.serving.max_staleness
    drawn = [_key_of(task) for task in _cursor(config).take((n + bound) * batch)]
    assert len(set(drawn)) == len(drawn), "this check needs more tasks"
    numbers = [drawn.index(key) for found in trained for key in found]
    assert len(set(numbers)) == len(numbers) == n * batch, f"trained twice: {sorted(numbers)}"
    book = step_folder.read_state(config.run.folder / "checkpoints" / f"step_{n}")["ledger"]
    known = {*range(book["first"]), *map(int, book["trained"])}
    assert set(numbers) == known, f"trained: {sorted(numbers)}, according to the ledger: {sorted(known)}"
    assert max(numbers) < book["next"] <= len(drawn)


def trained_on(config: Config, iteration: int) -> list[Key]:
    """Return the tasks of an iteration's groups, whose episodes must all be of one task."""
    samples = config.rollout.samples_per_task
    rows = played(config, iteration)
    keys: list[Key] = [(row["data_source"], row["split"], row["index"]) for row in rows]
    assert len(keys) == samples * config.rollout.tasks_per_iteration, f"iteration {iteration}: {len(keys)}"
    groups = [keys[at : at + samples] for at in range(0, len(keys), samples)]
    assert all(set(group) == {group[0]} and len(group) == samples for group in groups), groups
    assert [row["group"] for row in rows] == [place // samples for place in range(len(rows))]
    return [group[0] for group in groups]


def played(config: Config, iteration: int) -> list[dict[str, Any]]:
    path = config.run.folder / "trajectories" / f"iteration-{iteration:05d}.jsonl"
    return [json.loads(line) for line in path.open()]


def _cursor(config: Config) -> TaskCursor:
    assert config.data.train is not None
    return TaskCursor(tasks.read(Path(config.data.train)), config.run.seed)


def _key_of(task: Any) -> Key:
    return task.data_source, task.split, task.index
