"""Forecasts of a small run on a few GPUs, and the command that prints them."""

from __future__ import annotations

import json
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from megatron_stppo.config import ConfigError
from megatron_stppo.plan.simulation.workload import Sizes
from tests.plan import small_outlooks
from tests.plan.in_planner import command
from tests.plan.test_plans import EXAMPLES

LONG_TAIL = ("tool_seconds=1", "tool_seconds_p99=30", "switch_seconds=0.001")
NO_TOOLS = ("tool_seconds=0.000001", "tool_seconds_p99=0.000001", "switch_seconds=0.001")
SLOW_TRAINING = ("training_share=0.00000001",)


def test_training_at_the_peak_rate_takes_the_time_of_the_bounds(
    thin: Path, planner: ProcessPoolExecutor
) -> None:
    found, bound = planner.submit(small_outlooks.trainer_seconds, str(thin)).result()
    assert found == pytest.approx(bound, rel=1e-6)


def test_two_batches_share_the_wait_for_their_slow_calls(model: Path, planner: ProcessPoolExecutor) -> None:
    """Training takes no time here. At bound 1 two batches are played at a time, so an iteration takes about
    half of the longest episode, on any split."""
    found = planner.submit(small_outlooks.outlook, str(model), 8, (2, 4), LONG_TAIL).result()
    assert 1.5 < found["gain"] < 2.5
    gain = f"8 GPUs: asynchronous training is {found['gain']:.2f} times as fast as colocated training"
    assert found["verdict"][0] == gain
    printed = found["printed"].splitlines()
    assert [row for row in printed if "colocated  │" in row or "colocated │" in row]
    assert len([row for row in printed if " x 1 │" in row]) == 2  # 6 x 1 and 4 x 1
    assert "assumed: tool_seconds=1 s for a call of a tool, median" in printed


def test_replicas_whose_links_do_not_fit_beside_the_engine_are_left_out(
    thin: Path, planner: ProcessPoolExecutor
) -> None:
    full = (str(thin), 5, (4, 1), ("replica_memory=0.95",))
    printed = planner.submit(small_outlooks.outlook, *full).result()["printed"]
    assert "1 x 1 │" in printed and "4 x 1 │" not in printed, "one replica has no links"
    why = "rollout.gpu_memory_utilization=0.95 of a replica: 1.2 GiB of communicators do not fit beside it"
    assert f"{why}; choose at most 0.94 (here --assume replica_memory)" in printed


@pytest.mark.long
def test_two_gpus_without_a_tail_are_slower_apart(model: Path, planner: ProcessPoolExecutor) -> None:
    """Half of the GPUs train, so training takes twice as long, and there is nothing to hide."""
    assume = (*NO_TOOLS, *SLOW_TRAINING)
    found = planner.submit(small_outlooks.outlook, str(model), 2, (1,), assume).result()
    assert found["gain"] < 0.6


def test_the_command_prints_every_split_and_its_assumptions(thin: Path, planner: ProcessPoolExecutor) -> None:
    config = thin / "asynchronous.yaml"
    config.write_text(
        f"model: {{path: {thin}}}\n"
        "rollout: {max_context: 256, max_prompt_tokens: 128, max_turn_tokens: 64, tasks_per_iteration: 8}\n"
        "environment: {max_turns: 2, max_observation_tokens: 32}\n"
        "update: {minibatches: 1}\n"
    )
    arguments = ("--asynchronous", "--gpus", "1", "--gpus", "2", "--assume", "turns=1", "--json")
    result = command(planner, str(config), *arguments)
    assert (result.returncode, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert found["assumed"]["turns"] == 1
    one, two = found["outlooks"]
    assert (one["gpus"], one["splits"], one["best"]) == (1, [], None)
    assert one["left_out"] == [
        "1 GPUs: parallel.tensor * context * pipeline = 1 GPUs train, and none is left for a replica"
    ]
    (split,) = two["splits"]
    assert (split["trainer"], split["replicas"], two["left_out"]) == (1, 1, [])
    assert two["gain"] == pytest.approx(
        split["forecast"]["tokens_per_second"] / two["together"]["tokens_per_second"]
    )


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--gpus", "2", "--gpus", "4"), "--gpus: 2 values; give one, or add --asynchronous"),
        (("--gpus", "8", "--from", "runs/a"), "--from=runs/a: holds no trajectories/"),
        (("--gpus", "2", "--assume", "turns=1"), "--assume: only plan --asynchronous uses it"),
        (("--gpus", "2", "--asynchronous", "--assume", "turn=1"), "there is no assumption 'turn'"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    arguments: tuple[str, ...], why: str, planner: ProcessPoolExecutor
) -> None:
    result = command(planner, str(EXAMPLES / "qwen2.5-7b" / "config.yaml"), *arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("megatron-stppo: --") and why in result.stderr


def test_recorded_lengths_are_those_of_the_trajectories(tmp_path: Path, planner: ProcessPoolExecutor) -> None:
    """A prompt of 7 tokens, a turn of 3, an observation of 2 and a turn of 4."""
    with pytest.raises(ConfigError, match=r"^--from=.*: holds no trajectories/"):
        planner.submit(small_outlooks.recorded, tmp_path).result()
    turns = [
        {"token_ids": [1] * n, "rollout_logprob": [-1.0] * n, "observation_ids": [2] * read, "reward": 0.0}
        | {"versions": [[0, n]]}
        for n, read in ((3, 2), (4, 0))
    ]
    line = {"data_source": "game", "targets": ["a"], "split": "train", "index": 0, "outcome": "ok"}
    (tmp_path / "trajectories").mkdir()
    path = tmp_path / "trajectories" / "iteration-00001.jsonl"
    path.write_text(json.dumps(line | {"prompt_ids": [3] * 7, "turns": turns}) + "\n")
    assert planner.submit(small_outlooks.recorded, tmp_path).result() == (Sizes(((7, 3), (2, 4))),)
