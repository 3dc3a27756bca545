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
    folder = tmp_path_factory.mktemp("run")
    write(folder, 1, [0] * EPISODES)
    return folder


def write(folder: Path, iteration: int, branches: list[int]) -> None:
    """Write the trajectories of an iteration, given the number of each among the histories of its episode."""
    lines = []
    for n, branch in enumerate(branches):
        turn = {"token_ids": [100 + n] * ACTION, "rollout_logprob": [-1.0] * ACTION, "observation_ids": []}
        turn |= {"reward": 0.0, "versions": [[0, ACTION]]}
        line = {"data_source": "game", "targets": ["a"], "split": "train", "index": n, "outcome": "ok"}
        line |= {"branch": branch, "prompt_ids": [3] * PROMPT, "turns": [turn]}
        lines.append(json.dumps(line) + "\n")
    (folder / "trajectories").mkdir(exist_ok=True)
    (folder / "trajectories" / f"iteration-{iteration:05d}.jsonl").write_text("".join(lines))


def test_the_last_iterations_episodes_are_counted_with_all_their_histories(
    tmp_path: Path, planner: ProcessPoolExecutor
) -> None:
    write(tmp_path, 1, [0] * 8)
    write(tmp_path, 2, [0, 1, 2, 0, 1])
    found = [planner.submit(small_plans.newest, str(tmp_path), episodes).result() for episodes in (1, 2, 3)]
    assert found == [(3, "1"), (5, "2"), (5, "2")]
    write(tmp_path, 3, [0])
    assert planner.submit(small_plans.newest, str(tmp_path), 2).result() == (1, "1")


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
    thin: Path,
    source: Path,
    planner: ProcessPoolExecutor,
    gpus: int,
    budget: int,
    tasks: int,
    distinct: float,
) -> None:
    given = (str(thin), str(source), gpus, {"tokens_per_microbatch": budget}, tasks)
    found, plain, seconds = planner.submit(small_plans.sharing, *given).result()
    assert found.distinct == distinct and found.reason == f"prefixes shared, measured on {source}"
    assert plain.distinct == 1 and plain.reason.endswith("--from RUN_DIR measures them")
    for with_source, without in seconds:
        assert with_source == pytest.approx(distinct * without)


def test_a_plan_says_why_nothing_is_shared_and_how_small_the_run_is(
    thin: Path, source: Path, planner: ProcessPoolExecutor
) -> None:
    given = (str(thin), str(source), 2)
    of_context, *_ = planner.submit(small_plans.sharing, *given, {}, 8, {"context": 2}).result()
    assert of_context.distinct == 1 and of_context.reason.startswith("parallel.context=2: ")
    off, *_ = planner.submit(small_plans.sharing, *given, {"share_prefixes": "off"}, 8).result()
    assert (off.distinct, off.reason) == (1, "update.share_prefixes=off")
    small, *_ = planner.submit(small_plans.sharing, *given, {}, 16).result()
    assert small.reason == f"prefixes shared, measured on {source}, on 8 episodes instead of 16"


@pytest.mark.long
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
