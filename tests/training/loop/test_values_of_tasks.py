"""Which tasks a run plays, and that an environment gets the same in the run's own process, in a replica, and
as a command."""

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

from tests.replicas.test_promises import start
from tests.training.loop import small_run

MESSAGES = [
    {"role": "user", "content": "Which?"},
    {"role": "user", "content": "Rome", "name": "search"},
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
    """A run whose tasks are in a Parquet file with types that JSON does not have; one prompt is too long."""
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
    pq.write_table(pa.Table.from_pylist(rows), path.parent / "short.parquet")
    long = {**rows[0], "prompt": [{"role": "user", "content": 300 * "x"}], "extra_info": EXTRA | {"index": 4}}
    pq.write_table(pa.Table.from_pylist([long, *rows]), path.parent / "tasks.parquet")
    (path.parent / "reader.py").write_text(MODULE)
    return path


COMMAND = f"[{sys.executable},-m,megatron_stppo.agents.command,'reader:agent']"
WAYS = {
    "colocated": ("train", "tasks", "environment.kind=reader:factory"),
    "replica": ("train", "tasks", "environment.kind=reader:factory", "serving.replicas=1"),
    "command": ("rollout", "short", "environment.kind=agent", f"environment.command={COMMAND}"),
}
LONG = (
    "tasks.parquet: 1 of 5 prompts are longer than rollout.max_prompt_tokens=64 allows; their tasks are left "
    "out (the longest has "
)


@pytest.mark.parametrize("way", WAYS)
def test_a_task_has_the_same_values_everywhere(config: Path, way: str) -> None:
    command, data, *given = WAYS[way]
    train = f"data.train={config.parent / data}.parquet"
    said = run(config, command, f"run.name={way}", train, *given)
    file = config.parent / "runs" / way / "trajectories" / "iteration-00001.jsonl"
    played = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(p["outcome"], p["detail"]) for p in played] == [("wrong", SEEN)] * 4
    assert sorted(p["index"] for p in played) == [0, 1, 2, 3]
    assert said.count(LONG) == (data == "tasks")


def run(config: Path, command: str, *given: str, status: int = 0) -> str:
    path = f"{small_run.ROOT}:{config.parent}"
    return start([command, str(config), *COMMON, *given], status, PYTHONPATH=path)


def test_an_evaluation_counts_prompts_that_are_too_long_and_reads_no_training_tasks(config: Path) -> None:
    files = ("data.train=nowhere.jsonl", f"data.evaluate={config.parent}/tasks.parquet")
    given = ("run.name=measured", "environment.kind=reader:factory", "evaluate.samples=2")
    said = run(config, "evaluate", *given, *files)
    assert said.count(LONG) == 1 and "evaluate.samples=2 with evaluate.temperature=0: " in said
    result = json.loads((config.parent / "runs/measured/evaluate/model/result.json").read_text())
    assert (result["model"], result["checkpoint"]) == (str(config.parent / "model"), None)
    names = ("overlong_prompts", "episodes", "failed", "exact_match")
    assert [result[f"evaluate/{name}"] for name in names] == [1, 8, 0, 0.0]


@pytest.mark.parametrize("replicas", ["null", "1"])
def test_a_run_whose_prompts_are_all_too_long_ends_before_a_model_is_loaded(
    config: Path, replicas: str
) -> None:
    train = f"data.train={config.parent}/tasks.parquet"
    limit = ("rollout.max_prompt_tokens=9", "environment.kind=reader:factory", f"serving.replicas={replicas}")
    said = run(config, "train", f"run.name=none-{replicas}", train, *limit, status=2)
    assert "all 5 prompts are longer than rollout.max_prompt_tokens=9 allows (the shortest has " in said
    assert "megatron-stppo: models" not in said and "megatron-stppo: engine" not in said
