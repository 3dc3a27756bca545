"""A whole run whose agents are real clients of each API, in .venv-agents; `make test-agents` runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.agents.packages.test_packages import PATHS, python
from tests.replicas.test_promises import start
from tests.training.loop import small_run

pytestmark = [
    pytest.mark.timeout(1000),
    pytest.mark.skipif(not python("agents").exists(), reason="needs .venv-agents: make test-agents"),
]
COMMAND = [
    str(python("agents")),
    "-m",
    "megatron_stppo.agents.packages.command",
    "tests.agents.packages.clients:every",
]
AGENTS = (
    "parallel.tensor=1",
    "run.iterations=2",
    "run.checkpoint_every=2",
    "environment.kind=agent",
    f"environment.command={json.dumps(COMMAND)}",
    "environment.tool_parser=hermes",
    "environment.max_turns=4",
    "environment.deadline=200",
    "environment.max_failure_rate=1",
    "environment.retrieval.index=null",
    "rollout.tasks_per_iteration=6",
    "rollout.max_context=1000",
    "update.minibatches=1",
)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with one task per client, and twice all of them."""
    config = small_run.write(tmp_path_factory.mktemp("clients"))
    tasks = config.parent / "tasks.jsonl"
    tasks.write_text("".join(tasks.read_text().splitlines(keepends=True)[:6]))
    shape = config.parent / "model" / "config.json"
    shape.write_text(json.dumps(json.loads(shape.read_text()) | {"max_position_embeddings": 1000}))
    start(["train", str(config), "run.name=clients", *AGENTS], PYTHONPATH=PATHS)
    return config.parent / "runs" / "clients"


def test_the_first_ratio_is_1_and_the_mismatch_below_one_millionth(played: Path) -> None:
    metrics = [json.loads(line) for line in (played / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == 2
    for row in metrics:
        assert row["actor/first_kl_to_old"] == 0.0
        assert 0 < row["mismatch/mean_abs"] < 1e-6 and row["mismatch/current_mean_abs"] < 1e-6


def test_a_client_that_sends_all_back_has_one_history_and_mini_swe_agent_one_per_turn(played: Path) -> None:
    """The random model calls no tool, so mini-swe-agent leaves out its turns and asks again, three times."""
    rows: list[Any] = []
    for path in sorted((played / "trajectories").glob("iteration-?????.jsonl")):
        rows += map(json.loads, path.read_text().splitlines())
    seen = sorted((row["index"], row["branch"], len(row["turns"]), row["outcome"]) for row in rows)
    sdks = [(client, 0, 2) for client in range(2) for _ in range(2)]
    cut = [(2, 0, 1, "truncated")] * 2  # openai-agents raises an exception for an incomplete reply
    minis = [(client, branch, 1) for client in range(3, 6) for branch in range(3) for _ in range(2)]
    assert [row[:3] for row in seen if row[0] != 2] == [*sdks, *minis]
    assert {row[3] for row in seen if row[0] != 2} <= {"ok", "wrong"}, seen
    assert [row for row in seen if row[0] == 2] == cut
