"""Whole runs with an agent: the trainer's log-probs are those of the engine, colocated and asynchronous."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megatron_stppo import read_run
from tests.replicas.test_promises import rows, start, weights
from tests.training.loop import small_run

pytestmark = pytest.mark.long
AGENT = (
    "parallel.tensor=1",
    "run.iterations=3",
    "run.checkpoint_every=1",
    "run.keep_every=1",
    "environment.kind=agent",
    "environment.agent=tests.agents.endpoint.played:agent",
    "environment.max_turns=3",
    "environment.retrieval.index=null",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folders of a colocated run and of one with a replica at bound 0."""
    config = small_run.write(tmp_path_factory.mktemp("agents"))
    start(["train", str(config), "run.name=colocated", *AGENT])
    served = ("serving.replicas=1", "serving.timeout=30", "serving.max_staleness=0")
    start(["train", str(config), "run.name=served", *AGENT, *served])
    return config.parent / "runs" / "colocated", config.parent / "runs" / "served"


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_first_ratio_is_1_and_the_mismatch_below_one_millionth(runs: tuple[Path, Path]) -> None:
    for row in (row for folder in runs for row in metrics(folder)):
        assert row["actor/first_kl_to_old"] == 0.0
        assert 0 < row["mismatch/mean_abs"] < 1e-6 and row["mismatch/current_mean_abs"] < 1e-6
        assert 1 < row["rollout/branches"] < 2 and row["outcome/error"] == row["outcome/timeout"] == 0
        assert row["actor/gradient_norm"] > 0 and row["environment/letters"] > 0


def test_a_run_with_a_replica_is_the_colocated_one_bit_for_bit(runs: tuple[Path, Path]) -> None:
    colocated, served = runs
    assert rows(colocated) == rows(served)
    assert weights(colocated, 3) == weights(served, 3)


@pytest.fixture(scope="module")
def tensor_parallel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose engine has two ranks. Only the first one has the endpoint."""
    config = small_run.write(tmp_path_factory.mktemp("tensor"))
    done = small_run.run("train", config, "run.name=tensor", *AGENT, "parallel.tensor=2")
    assert done.returncode == 0, done.stderr[-3000:]
    return config.parent / "runs" / "tensor"


def test_the_first_ratio_is_1_with_a_tensor_parallel_engine(tensor_parallel: Path) -> None:
    for row in metrics(tensor_parallel):
        assert row["actor/first_kl_to_old"] == 0.0
        assert 0 < row["mismatch/current_mean_abs"] < 1e-6 and row["actor/gradient_norm"] > 0
        assert 1 < row["rollout/branches"] < 2 and row["outcome/error"] == row["outcome/timeout"] == 0


def test_tables_of_a_run_have_a_row_per_history(tensor_parallel: Path) -> None:
    run = read_run(tensor_parallel)
    table = run.episodes
    first = table[table.branch == 0]
    assert len(first) == 3 * 4 < len(table), "3 iterations of 4 tasks"
    assert table.groupby("iteration").branch.agg(lambda of: len(of) / (of == 0).sum()).tolist() == (
        run.metrics["rollout/branches"].tolist()
    )
    assert first["environment/letters"].notna().all() and (table.turns > 0).all()


def test_every_history_is_a_trajectory_of_its_episodes_group(runs: tuple[Path, Path]) -> None:
    lines = (runs[0] / "trajectories" / "iteration-00001.jsonl").read_text().splitlines()
    played = [json.loads(line) for line in lines]
    by_episode = [(row["index"], row["branch"], row["group"], len(row["turns"])) for row in played]
    for first, second in pairwise(played):
        if second["branch"]:
            assert all(first[name] == second[name] for name in ("group", "index", "reward"))
            assert second["prompt_ids"][: len(first["prompt_ids"])] == first["prompt_ids"]
    assert {branch for index, branch, _, _ in by_episode if index % 2} == {0, 1}
    assert {branch for index, branch, _, _ in by_episode if not index % 2} == {0}


def test_a_run_is_replayed_bit_for_bit_and_every_log_prob_passes_the_audit(runs: tuple[Path, Path]) -> None:
    colocated, served = runs
    start(["replay", str(colocated), "run.name=again"])
    assert weights(colocated.parent / "again", 3) == weights(colocated, 3)
    assert "passed; " in start(["audit", str(served)])
