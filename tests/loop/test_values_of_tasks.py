"""An environment gets the same task in the run's own process, in a replica, and as a command."""

from __future__ import annotations

import datetime
import decimal
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.loop import small_run
from tests.serving.test_promises import start

MESSAGES = [
    {"role": "user", "content": "Which?"},
    {"role": "tool", "content": "Rome", "name": "search"},
]
EXTRA = {
    "created": datetime.datetime(2026, 1, 2, 3, 4),
    "price": decimal.Decimal("1.50"),
    "image": {"bytes": b"\x89PNG", "path": None},
    "n": [1, 2],
}
# {"created", "price", "image", "n"} with JSON's values, and the messages with their keys
SEEN = (
    "[('created', '2026-01-02T03:04:00'), ('image', {'bytes': 'iVBORw=='}), ('n', [1, 2]), "
    "('price', '1.50')][('Paris',), 'Rome', {'name': 'search'}]"
)
MODULE = """
import json, os, sys, urllib.request

from megatron_stppo.environments.base import StepResult


def seen(task):
    last = task.prompt[-1]
    return f"{sorted(task.extra.items())}{[task.targets, last.content, last.extra]}"


class Reader:
    stop_strings = ()

    async def reset(self, task, seed):
        self.seen = seen(task)
        return list(task.prompt)

    async def step(self, action):
        return StepResult("", len(action) % 8 / 8, done=True, valid=True, outcome="wrong", detail=self.seen)

    async def close(self): ...


def factory(section):
    return Reader


async def agent(episode):
    body = {"messages": [message.as_dict() for message in episode.task.prompt]}
    headers = {"Authorization": f"Bearer {episode.api_key}", "Content-Type": "application/json"}
    asked = urllib.request.Request(
        episode.base_url + "/chat/completions", json.dumps(body).encode(), headers
    )
    urllib.request.urlopen(asked).read()
    return {"reward": 1, "outcome": "wrong", "detail": seen(episode.task)}
"""
COMMON = ("run.iterations=1", "parallel.tensor=1", "environment.retrieval.index=null")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose tasks are in a Parquet file with types that JSON does not have."""
    path = small_run.write(tmp_path_factory.mktemp("values"))
    rows: list[dict[str, Any]] = [
        {
            "data_source": "t",
            "prompt": MESSAGES,
            "reward_model": {"ground_truth": "Paris"},
            "extra_info": EXTRA | {"index": index},
        }
        for index in range(4)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path.parent / "tasks.parquet")
    (path.parent / "reader.py").write_text(MODULE)
    return path


COMMAND = f"[{sys.executable},-m,megatron_stppo.adapters.command,'reader:agent']"
WAYS = {
    "colocated": ("train", "environment.kind=reader:factory"),
    "replica": ("train", "environment.kind=reader:factory", "serving.replicas=1", "serving.timeout=30"),
    "command": ("rollout", "environment.kind=agent", f"environment.command={COMMAND}"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_task_has_the_same_values_everywhere(config: Path, way: str) -> None:
    command, *given = WAYS[way]
    train = f"data.train={config.parent / 'tasks.parquet'}"
    path = f"{small_run.ROOT}:{config.parent}"
    start([command, str(config), f"run.name={way}", train, *COMMON, *given], PYTHONPATH=path)
    file = config.parent / "runs" / way / "trajectories" / "iteration-00001.jsonl"
    played = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(p["outcome"], p["detail"]) for p in played] == [("wrong", SEEN)] * 4
