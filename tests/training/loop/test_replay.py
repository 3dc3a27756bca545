"""A run with planted faults, its records, and a replay of it without an engine."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file, save_file

from megatron_stppo.data.tasks import TaskCursor, read
from tests.forking import stand_in
from tests.training.loop import small_run
from tests.training.loop.test_resume import rows

ITERATIONS, PER_ITERATION = 8, 4
FAILS, OVERLONG, TOKENS = 4, 5, 200  # iteration with a failed episode; with a long prompt; its tokens
# {iteration: reward of its last task, which the second rank's engine plays}
PLANTED = {6: "1e4", 7: "1e4", 8: "1e4"}
ENVIRONMENT = '''
from megatron_stppo.environments.base import StepResult
from megatron_stppo.base.types import Message


class Payer:
    """One turn, whose reward is what the task's target says."""

    stop_strings = ()

    async def reset(self, task, seed):
        self._reward = float(task.targets[0])
        return [Message("user", task.prompt[0].content + task.extra.get("padding", ""))]

    async def step(self, action):
        return StepResult("", self._reward, True, True, False, "ok")

    async def close(self): ...


def factory(section):
    return Payer
'''
CHANGES: dict[str, dict[str, Any]] = {
    "run": {"iterations": ITERATIONS, "nonfinite_budget": 2, "rollback": True, "spike_window": 8},
    "parallel": {"tensor": 1},
    "environment": {
        "kind": "payer:factory",
        "max_turns": 1,
        "max_observation_tokens": 24,
        "max_failure_rate": 0.25,
    },
    "update": {
        "minibatches": 2,
        "actor": {"lr": 1e-3, "warmup_fraction": 0.25},  # 4 of 16 steps; the replay has run.iterations=3
        "critic": {"lr": 1e-3, "warmup_fraction": 0},
    },
}


def command(root: Path, ranks: int, *arguments: str, path: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command with the environment above, under torchrun for ranks > 1.

    It is forked from a process that has imported vLLM, unless it has a `path` for PYTHONPATH.
    """
    python = sys.executable if path else stand_in.python()
    program = small_run.torchrun(ranks, python) if ranks > 1 else [python, "-m", "megatron_stppo"]
    found = os.pathsep.join(filter(None, (path, str(root), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [*program, *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env=small_run.ENVIRONMENT | {"PYTHONPATH": found},
        check=False,
    )


def write(root: Path) -> Path:
    """Write tasks in a known order, so that each iteration gets its planned reward."""
    path = small_run.write(root)
    config = yaml.safe_load(path.read_text())
    config["run"].update(CHANGES["run"])
    config |= {name: section for name, section in CHANGES.items() if name != "run"}
    path.write_text(yaml.safe_dump(config))
    (root / "payer.py").write_text(ENVIRONMENT)
    tasks = root / "tasks.jsonl"
    lines = [json.loads(tasks.read_text().splitlines()[0]) for _ in range(ITERATIONS * PER_ITERATION)]
    for index, row in enumerate(lines):
        row["extra_info"] = {"split": "train", "index": index}
        row["reward_model"] = {"ground_truth": {"target": [str(index % 7 / 10)]}}
    tasks.write_text("".join(json.dumps(row) + "\n" for row in lines))
    cursor = TaskCursor(read(tasks), seed=0)
    for iteration in range(1, ITERATIONS + 1):
        first, *_, last = (task.index for task in cursor.take(PER_ITERATION))
        if iteration == FAILS:
            lines[first]["reward_model"] = {"ground_truth": {"target": ["nothing"]}}
        if iteration == OVERLONG:
            lines[first]["extra_info"]["padding"] = "é" * (TOKENS // 2)
        if iteration in PLANTED:
            lines[last]["reward_model"] = {"ground_truth": {"target": [PLANTED[iteration]]}}
    tasks.write_text("".join(json.dumps(row) + "\n" for row in lines))
    return path


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("replay"))


@pytest.fixture(scope="module")
def recorded(config: Path) -> tuple[Path, str]:
    """(folder of the run with an engine, its stderr)."""
    done = command(config.parent, 2, "train", str(config), "run.name=recorded", "run.keep_checkpoints=9")
    assert done.returncode == 0, done.stderr[-3000:]
    return config.parent / "runs" / "recorded", done.stderr


@pytest.fixture(scope="module")
def no_engine(config: Path) -> str:
    """A folder for PYTHONPATH whose vllm cannot be imported."""
    package = config.parent / "no_engine" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('an engine is imported')")
    return str(package.parent)


@pytest.fixture(scope="module")
def replayed(config: Path, recorded: tuple[Path, str]) -> Path:
    """Run iterations 1 to 3 from the recorded rollouts, with a dump of every batch."""
    given = ("run.name=replayed", "run.iterations=3", "run.dump=all")
    done = command(config.parent, 2, "replay", str(recorded[0]), *given)
    assert done.returncode == 0, done.stderr[-3000:]
    return config.parent / "runs" / "replayed"


def test_failed_episodes_and_overlong_prompts_give_one_line_from_the_first_rank(
    recorded: tuple[Path, str],
) -> None:
    run, said = recorded
    lines = [line for line in said.splitlines() if "failures WARNING" in line]
    assert len(lines) == 2, lines
    assert f"iteration {FAILS}: 1 of 4 episodes failed (1 error); the first: task " in lines[0]
    assert lines[0].endswith("error: ValueError: could not convert string to float: 'nothing'")
    assert f"iteration {OVERLONG}: 1 of 4 prompts was too long and is not played: task " in lines[1]
    assert lines[1].endswith("tokens exceeds rollout.max_prompt_tokens=64")
    assert [row["rollout/overlong_prompts"] for row in rows(run)] == [n == OVERLONG for n in range(1, 9)]
    assert [row["outcome/error"] for row in rows(run)] == [n == FAILS for n in range(1, 9)]


def test_faults_are_dumped_with_their_reason(recorded: tuple[Path, str]) -> None:
    dumps = {path.name: json.loads((path / "batch.json").read_text()) for path in recorded[0].glob("dumps/*")}
    assert sorted(dumps) == [f"iteration-{n:05d}" for n in PLANTED]
    assert any("critic/loss=" in reason for reason in dumps["iteration-00006"]["reasons"])


def test_a_spike_rolls_back_once_per_checkpoint_and_the_run_continues_with_the_next_tasks(
    recorded: tuple[Path, str],
) -> None:
    run, said = recorded
    found = rows(run)
    assert [row["fault/spikes"] > 0 for row in found] == [False] * 5 + [True] * 3
    assert [row.get("fault/rolled_back_to") for row in found] == [None] * 5 + [3, 6, None]
    assert "iteration 8: no second rollback" in said
    third, sixth, eighth = (small_run.tensors(run, n) for n in (3, 6, 8))
    assert third == sixth != eighth
    state = json.loads((run / "checkpoints/step_6/state.json").read_text())
    assert state["cursor"]["position"] == 6 * PER_ITERATION
    assert found[6]["mismatch/mean_abs"] < 1e-5, "the engine serves the restored weights"


def test_replayed_rollouts_give_the_same_numbers(recorded: tuple[Path, str], replayed: Path) -> None:
    assert rows(replayed) == rows(recorded[0])[:3]


def test_replayed_rollouts_give_the_same_weights_and_optimizer_states_bitwise(
    recorded: tuple[Path, str], replayed: Path
) -> None:
    runs = (replayed, recorded[0])
    assert small_run.tensors(replayed, 3) == small_run.tensors(recorded[0], 3)
    states = [json.loads((run / "checkpoints/step_3/state.json").read_text()) for run in runs]
    begun = [state["begun_with"] for state in states]
    assert begun[0] == begun[1], "a resume of either is refused with another KL reference"


def with_an_infinite_reward(run: Path, iteration: int, copy: Path) -> Path:
    """Copy a run's dumps, and change the first reward of an iteration. Return the copy's folder."""
    shutil.copytree(run / "dumps", copy / "dumps")
    shutil.copy(run / "config.yaml", copy)
    for path in copy.glob(f"dumps/iteration-{iteration:05d}/*.safetensors"):
        columns = load_file(path)
        columns["reward_T"][0] = math.inf
        save_file(columns, path)
    return copy


def test_batches_replayed_without_an_engine_give_the_same_steps_on_other_ranks_and_use_the_budget_again(
    config: Path, replayed: Path, no_engine: str
) -> None:
    source = with_an_infinite_reward(replayed, 2, config.parent / "infinite")
    given = ("run.name=again", "run.iterations=3", "run.nonfinite_budget=1", "--records", "batches")
    warm_up = "update.actor.warmup_fraction=0.6"  # 4 of the 6 steps with which `replayed` began
    done = command(config.parent, 1, "replay", str(source), *given, warm_up, path=no_engine)
    assert done.returncode == 93, done.stderr[-3000:]
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("megatron-stppo: 2 steps")]
    assert "2 steps were not finite, run.nonfinite_budget=1; the last batch: reward_T: 1 of" in line
    assert line.endswith("the environment returned these rewards, correct it to return finite numbers")
    (row,), expected = rows(config.parent / "runs/again"), rows(replayed)[0]
    for key in ("actor/objective", "actor/gradient_norm", "critic/loss", "critic/gradient_norm"):
        assert row[key] == pytest.approx(expected[key], rel=1e-4), key
    assert "iteration 2: reward_T: 1 of" in done.stderr
    dump = config.parent / "runs/again/dumps/iteration-00002/batch.json"
    assert json.loads(dump.read_text())["reasons"][0] == "actor: steps that are not finite"


def test_batches_of_a_run_with_the_engines_old_policy_are_refused_with_another_one(
    config: Path, replayed: Path
) -> None:
    """The dump is changed into that of a run with old_policy=behaviour."""
    source = config.parent / "behaviour"
    shutil.copytree(replayed / "dumps", source / "dumps")
    shutil.copy(replayed / "config.yaml", source)
    for path in source.glob("dumps/*/*.safetensors"):
        tensors_of = load_file(path)
        save_file(tensors_of | {"old_logprob_T": tensors_of["rollout_logprob_T"].clone()}, path)
    given = ("run.name=scored", "run.iterations=2", "--records", "batches")
    done = command(config.parent, 1, "replay", str(source), *given)
    assert done.returncode == 2, done.stderr[-3000:]
    assert done.stderr.splitlines()[-1] == (
        f"megatron-stppo: algorithm.old_policy=score: RUN_DIR={source}: the old log-probs of iteration 1 are "
        "the engine's; set it to behaviour, or replay the run's rollouts"
    )
    teacher = f"model.reference_path={config.parent}/model"
    given = (*given, "algorithm.old_policy=behaviour", "algorithm.kl_coefficient=0.1", teacher)
    done = command(config.parent, 1, "replay", str(source), *given)
    assert done.returncode == 2, done.stderr[-3000:]
    assert done.stderr.splitlines()[-1] == (
        f"megatron-stppo: {teacher}: the batches have the log-probs of that run's reference, None; give the "
        "same, or replay the run's rollouts"
    )


def test_rollouts_of_fewer_episodes_than_minibatches_are_refused(
    config: Path, recorded: tuple[Path, str]
) -> None:
    given = ("run.name=few", "run.iterations=1", "update.minibatches=8", "rollout.tasks_per_iteration=8")
    done = command(config.parent, 1, "replay", str(recorded[0]), *given)
    assert done.returncode == 2, done.stderr[-3000:]
    assert "4 trajectories must be a multiple of update.minibatches=8 * 1" in done.stderr.splitlines()[-1]


def test_rewards_that_never_vary_leave_the_actor_unchanged_and_give_warnings(
    config: Path, recorded: tuple[Path, str], no_engine: str
) -> None:
    """Replay four iterations of the run with all rewards replaced by 1, without an engine."""
    constant = config.parent / "constant"
    (constant / "trajectories").mkdir(parents=True)
    for name in (f"iteration-{n:05d}.jsonl" for n in range(1, 5)):
        given = [json.loads(x) for x in (recorded[0] / "trajectories" / name).read_text().splitlines()]
        for row in given:
            row["turns"] = [turn | {"reward": 1.0} for turn in row["turns"]]
        (constant / "trajectories" / name).write_text("".join(json.dumps(row) + "\n" for row in given))
    (constant / "config.yaml").write_text((recorded[0] / "config.yaml").read_text())
    options = ("run.name=held", "run.iterations=4", f"--config={config}")
    done = command(config.parent, 1, "replay", str(constant), *options, path=no_engine)
    assert done.returncode == 0, done.stderr[-3000:]
    found = rows(config.parent / "runs" / "held")
    assert [(row["actor/held"], row["actor/skipped"], row["actor/kl_to_old"]) for row in found] == [
        (1, 0, 0)
    ] * 4
    assert all(row["actor/gradient_norm"] > 0 for row in found), "there was a gradient"
    assert found[-1]["critic/loss"] < found[0]["critic/loss"], "the critic learns to expect 1"
    said = [
        line.partition("WARNING ")[2] for line in done.stderr.splitlines() if "rewards do not vary" in line
    ]
    assert [line.partition(":")[0] for line in said] == ["iteration 1", "iteration 2", "iteration 4"]
    assert "4 iterations in a row" in said[2]


@pytest.mark.long
def test_rollouts_without_a_trainer_equal_those_of_the_run(config: Path, recorded: tuple[Path, str]) -> None:
    done = command(config.parent, 2, "rollout", str(config), "run.name=played", "run.iterations=1")
    assert done.returncode == 0, done.stderr[-3000:]
    played = config.parent / "runs" / "played"
    name = "trajectories/iteration-00001.jsonl"
    assert (played / name).read_text() == (recorded[0] / name).read_text()
    assert not (played / "checkpoints").exists()
