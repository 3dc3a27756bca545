"""A whole run whose agents are real clients of each API, in .venv-agents; `make test-agents` runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.agents.packages.scripted import PATHS, ROOT
from tests.agents.packages.test_packages import python
from tests.replicas.test_promises import start
from tests.training.loop import small_run

pytestmark = [
    pytest.mark.timeout(1000),
    pytest.mark.skipif(not python("agents").exists(), reason="needs .venv-agents: make test-agents"),
]
AGENTS = (
    "parallel.tensor=1",
    "run.iterations=2",
    "run.checkpoint_every=2",
    "environment.kind=agent",
    "environment.tool_parser=hermes",
    "environment.max_turns=4",
    "environment.deadline=200",
    "environment.max_failure_rate=1",
    "environment.retrieval.index=null",
    "update.minibatches=1",
)


def played_with(folder: Path, clients: str, tasks: int, context: int) -> Path:
    """Return the folder of a run whose agent is that function of clients.py, with each task twice."""
    config = small_run.write(folder)
    rows = config.parent / "tasks.jsonl"
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:tasks]))
    shape = config.parent / "model" / "config.json"
    shape.write_text(json.dumps(json.loads(shape.read_text()) | {"max_position_embeddings": context}))
    program = [str(python("agents")), "-m", "megatron_stppo.agents.command"]
    given = (
        f"environment.command={json.dumps([*program, f'tests.agents.packages.clients:{clients}'])}",
        f"rollout.tasks_per_iteration={tasks}",
        f"rollout.max_context={context}",
    )
    start(["train", str(config), "run.name=clients", *AGENTS, *given], PYTHONPATH=PATHS)
    return config.parent / "runs" / "clients"


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return played_with(tmp_path_factory.mktemp("clients"), "every", 6, 1000)


@pytest.fixture(scope="module")
def harnessed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not all(Path(ROOT, f".venv-{name}").exists() for name in ("claude", "codex", "openhands")):
        pytest.skip("needs .venv-claude, .venv-codex and .venv-openhands: make test-agents")
    return played_with(tmp_path_factory.mktemp("harnesses"), "harnesses", 3, 20_000)


def check(folder: Path) -> list[Any]:
    """Check the ratios and the mismatch of both iterations. Return the rows of the trajectories."""
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == 2
    for row in metrics:
        assert row["actor/first_kl_to_old"] == 0.0
        assert 0 < row["mismatch/mean_abs"] < 1e-6 and row["mismatch/current_mean_abs"] < 1e-6
    rows: list[Any] = []
    for path in sorted((folder / "trajectories").glob("iteration-?????.jsonl")):
        rows += map(json.loads, path.read_text().splitlines())
    return rows


def test_a_client_that_sends_all_back_has_one_history_and_mini_swe_agent_one_per_turn(played: Path) -> None:
    """The random model calls no tool, so mini-swe-agent leaves out its turns and asks again, three times."""
    rows = check(played)
    seen = sorted((row["index"], row["branch"], len(row["turns"]), row["outcome"]) for row in rows)
    sdks = [(client, 0, 2) for client in range(2) for _ in range(2)]
    cut = [(2, 0, 1, "truncated")] * 2  # openai-agents raises an exception for an incomplete reply
    minis = [(client, branch, 1) for client in range(3, 6) for branch in range(3) for _ in range(2)]
    assert [row[:3] for row in seen if row[0] != 2] == [*sdks, *minis]
    assert {row[3] for row in seen if row[0] != 2} <= {"ok", "wrong"}, seen
    assert [row for row in seen if row[0] == 2] == cut


def test_claude_code_goes_on_after_an_incomplete_turn_codex_ends_openhands_takes_it(harnessed: Path) -> None:
    rows = check(harnessed)
    seen = sorted((row["index"], row["branch"], len(row["turns"]), row["outcome"]) for row in rows)
    assert seen == [*[(0, 0, 4, "wrong")] * 2, *[(1, 0, 1, "truncated")] * 2, *[(2, 0, 1, "wrong")] * 2]
