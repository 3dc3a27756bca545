"""Plans that count the prefixes that the trajectories of a run share."""

from __future__ import annotations

import json
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.plan import small_plans
from tests.plan.test_plans import run

PROMPT, ACTION, EPISODES = 10, 10, 8  # every prompt is the same, and no two actions begin alike


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with one iteration."""
    lines = []
    for n in range(EPISODES):
        turn = {"token_ids": [100 + n] * ACTION, "rollout_logprob": [-1.0] * ACTION, "observation_ids": []}
        turn |= {"reward": 0.0, "versions": [[0, ACTION]]}
        line = {"data_source": "game", "targets": ["a"], "split": "train", "index": n, "outcome": "ok"}
        lines.append(json.dumps(line | {"prompt_ids": [3] * PROMPT, "turns": [turn]}) + "\n")
    folder = tmp_path_factory.mktemp("run")
    (folder / "trajectories").mkdir()
    (folder / "trajectories" / "iteration-00001.jsonl").write_text("".join(lines))
    return folder


@pytest.mark.parametrize(
    ("gpus", "budget", "tasks", "distinct"),
    [
        (1, 512, 8, (10 + 8 * 10) / 160),
        (2, 512, 8, 2 * (10 + 4 * 10) / 160),  # each data-parallel rank computes the prompt
        (1, 30, 8, 4 * (10 + 2 * 10) / 160),  # and each micro-batch
        (1, 512, 4, (10 + 4 * 10) / 80),  # an iteration of the planned run has fewer episodes
    ],
)
def test_the_share_of_distinct_tokens_follows_ranks_microbatches_and_batch(
    model: Path,
    source: Path,
    planner: ProcessPoolExecutor,
    gpus: int,
    budget: int,
    tasks: int,
    distinct: float,
) -> None:
    given = (str(model), str(source), gpus, {"tokens_per_microbatch": budget}, tasks)
    found, plain, seconds = planner.submit(small_plans.sharing, *given).result()
    assert found.distinct == distinct and found.reason == f"prefixes shared, measured on {source}"
    assert plain.distinct == 1 and plain.reason.endswith("--from RUN_DIR measures them")
    for with_source, without in seconds:
        assert with_source == pytest.approx(distinct * without)


def test_a_plan_says_why_nothing_is_shared_and_how_small_the_run_is(
    model: Path, source: Path, planner: ProcessPoolExecutor
) -> None:
    given = (str(model), str(source), 2)
    of_context, *_ = planner.submit(small_plans.sharing, *given, {}, 8, {"context": 2}).result()
    assert of_context.distinct == 1 and of_context.reason.startswith("parallel.context=2: ")
    off, *_ = planner.submit(small_plans.sharing, *given, {"share_prefixes": "off"}, 8).result()
    assert (off.distinct, off.reason) == (1, "update.share_prefixes=off")
    small, *_ = planner.submit(small_plans.sharing, *given, {}, 16).result()
    assert small.reason == f"prefixes shared, measured on {source}, on 8 episodes instead of 16"


def test_the_command_prints_the_share_and_refuses_a_run_that_is_too_small(model: Path, source: Path) -> None:
    config = model / "shared.yaml"
    config.write_text(
        f"model: {{path: {model}}}\n"
        "rollout: {max_context: 256, max_prompt_tokens: 128, max_turn_tokens: 64, tasks_per_iteration: 8}\n"
        "update: {minibatches: 1}\n"
    )
    result = run(str(config), "--gpus", "1", "--from", str(source))
    assert (result.returncode, result.stderr) == (0, "")
    line = f"tokens computed: 56 % of the trajectories' (prefixes shared, measured on {source})"
    assert line in result.stdout.splitlines()
    asynchronous = run(str(config), "--asynchronous", "--gpus", "2", "--from", str(source))
    assert f"lengths and shared prefixes: those of {source}" in asynchronous.stdout.splitlines()
    few = run(
        str(config),
        "--gpus",
        "1",
        "--from",
        str(source),
        "update.minibatches=16",
        "rollout.tasks_per_iteration=16",
    )
    assert few.returncode == 2 and "8 episodes, fewer than update.minibatches=16" in few.stderr
