"""Whole asynchronous runs: equal to the synchronous one at bound 0, audited, resumed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from megatron_stppo.checkpoint.step_folder import EPISODES
from megatron_stppo.replicas.wire.episodes import decode_episodes, unpack_record
from tests import orders
from tests.documented import undocumented
from tests.forking import stand_in
from tests.training.loop import small_run
from tests.training.loop.test_resume import NOT_EQUAL

COMMON = (
    "parallel.tensor=1",
    "run.evaluate_every=2",
    "run.checkpoint_every=1",
    "run.keep_every=1",
    "evaluate.tasks=3",
    "environment.kind=tests.replicas.late_tools:factory",
)
ITERATIONS = 4  # of runs with a bound above 0
SERVED = ("serving.replicas=1", "serving.timeout=30")
# Two episodes at a time and long turns: the trainer waits for the replica, and every update interrupts turns.
BUSY = (
    f"run.iterations={ITERATIONS}",
    "serving.max_staleness=2",
    "serving.concurrency=2",
    "rollout.max_turn_tokens=48",
    "rollout.overlap_tools=true",
)
# Two episodes of each task, which often get the same reward, are replaced by those of the next task.
RESAMPLED = (
    "algorithm.preset=grpo",
    "algorithm.whiten=true",
    "environment.reward=tests.replicas.late_tools:coarse",
    "rollout.samples_per_task=2",
    "rollout.resample=2",
)
Run = Callable[..., Path]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A function that trains, and returns the run's folder. No collective of a run would hang on GPUs."""
    config = small_run.write(tmp_path_factory.mktemp("served"))

    def train(name: str, *overrides: str, python: str = "", **variables: str) -> Path:
        variables[orders.FOLDER] = folder = mkdtemp(dir=config.parent)
        start(["train", str(config), f"run.name={name}", *COMMON, *overrides], python=python, **variables)
        assert python or orders.findings(Path(folder)) == []
        return config.parent / "runs" / name

    return train


def start(arguments: list[str], status: int = 0, python: str = "", **variables: str) -> str:
    """Run a command in one process, and return what it printed. It is forked, unless `python` starts it."""
    done = subprocess.run(
        [python or stand_in.python(), "-m", "megatron_stppo", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env=small_run.ENVIRONMENT | variables,
        check=False,
    )
    assert done.returncode == status, done.stderr[-3000:] + logs(arguments)
    return done.stdout + done.stderr


def logs(arguments: list[str]) -> str:
    """Return the end of the replicas' logs."""
    names = [word.removeprefix("run.name=") for word in arguments if word.startswith("run.name=")]
    found = Path(arguments[1]).parent.glob(f"runs/{names[0]}/logs/replica*.log") if names else ()
    return "".join(f"\n{path}:\n{path.read_text()[-3000:]}" for path in found)


def rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics that do not depend on time, and that both kinds of runs have."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    left_out = (*NOT_EQUAL, "serving/")
    return [{k: v for k, v in json.loads(x).items() if not k.startswith(left_out)} for x in lines]


def weights(folder: Path, step: int) -> dict[str, bytes]:
    """Return the files of a checkpoint that hold numbers of the models."""
    path = folder / "checkpoints" / f"step_{step}"
    return {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*.distcp")}


def trajectories(folder: Path, iteration: int) -> str:
    return (folder / "trajectories" / f"iteration-{iteration:05d}.jsonl").read_text()


@pytest.fixture(scope="module")
def asynchronous(run: Run) -> Path:
    """Four iterations with a bound of 2, in which tools answer at times that no other run has, groups are
    dropped, and an update meets a turn. On a busy machine some runs have no such turn, and are repeated."""
    for attempt in range(4):
        folder = run(f"bound2-{attempt}", *SERVED, *BUSY, *RESAMPLED, LATE="0.05")
        if any(len(turn["versions"]) > 1 for turn in turns_of(folder)):
            return folder
    raise AssertionError("no turn was updated in four runs")


def turns_of(folder: Path) -> list[dict[str, Any]]:
    """Return the turns of the trajectories of all iterations."""
    lines = [line for n in range(1, ITERATIONS + 1) for line in trajectories(folder, n).splitlines()]
    return [turn for line in lines for turn in json.loads(line)["turns"]]


def ages_of(folder: Path) -> set[int]:
    """Return how many versions older than the newest one the tokens of all iterations are."""
    return {
        n - 1 - version
        for n in range(1, ITERATIONS + 1)
        for line in trajectories(folder, n).splitlines()
        for turn in json.loads(line)["turns"]
        for version, _ in turn["versions"]
    }


def test_bound_0_is_the_synchronous_run_bit_for_bit(run: Run) -> None:
    colocated = run("colocated", "run.iterations=4")
    served = run("bound0", "run.iterations=4", *SERVED, "serving.max_staleness=0")
    assert rows(served) == rows(colocated)
    assert not any(row.get("actor/held") for row in rows(served)), "the actor must be updated"
    assert all(trajectories(served, n) == trajectories(colocated, n) for n in range(1, 5))
    assert weights(served, 4) == weights(colocated, 4) != weights(served, 3)


@pytest.fixture(scope="module")
def resampled(run: Run) -> Path:
    """A colocated run of three iterations, in which groups are dropped."""
    return run("resampled", "run.iterations=3", *RESAMPLED)


@pytest.mark.long
def test_bound_0_is_the_synchronous_run_bit_for_bit_also_if_groups_are_dropped(
    run: Run, resampled: Path
) -> None:
    given = ("run.iterations=3", *SERVED, "serving.max_staleness=0", *RESAMPLED)
    served = run("bound0-resampled", *given, python=sys.executable)  # as a user starts it
    assert rows(served) == rows(resampled)
    found = rows(resampled)[1:]
    assert sum(row["rollout/resampled"] for row in found) > 0 and not any(row["actor/held"] for row in found)
    assert all(trajectories(served, n) == trajectories(resampled, n) for n in range(1, 4))
    assert weights(served, 3) == weights(resampled, 3) != weights(served, 2)


@pytest.mark.long
def test_a_checkpoint_has_the_position_after_all_tasks_that_were_played(resampled: Path) -> None:
    given = [*COMMON, *RESAMPLED, "run.name=played", "run.iterations=3"]
    config = resampled.parents[1] / "config.yaml"
    start(["rollout", str(config), "--from", str(resampled), "--start", "step_2", *given])
    assert trajectories(resampled.with_name("played"), 3) == trajectories(resampled, 3)


def test_above_bound_0_turns_go_on_at_new_versions_and_no_token_is_older_than_the_bound(
    asynchronous: Path,
) -> None:
    ages = ages_of(asynchronous)
    assert max(ages) <= 2 and len(ages) > 1


@pytest.mark.long
@pytest.mark.usefixtures("one_order")
@pytest.mark.parametrize("layout", [("parallel.tensor=2",), ("parallel.tensor=1", "parallel.pipeline=2")])
def test_no_collective_would_hang_on_gpus_where_two_ranks_train_while_they_send(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: tuple[str, ...]
) -> None:
    monkeypatch.setitem(small_run.ENVIRONMENT, orders.FOLDER, str(tmp_path / "orders"))
    config = small_run.write(tmp_path)
    small_run.run("train", config, "run.iterations=3", "serving.replicas=2", *SERVED[1:], *layout).succeeded()


def test_with_complete_each_episode_is_exactly_as_old_as_the_bound_and_a_resumed_run_is_the_same(
    run: Run,
) -> None:
    """Tools are slow, so that with `recompute` most episodes would have two versions."""
    given = (*SERVED, "serving.update=complete", "serving.max_staleness=1", "run.iterations=3")
    whole = run("complete", *given, LATE="0.5")
    for n in range(1, 4):
        turns = [turn for x in trajectories(whole, n).splitlines() for turn in json.loads(x)["turns"]]
        versions = {version for turn in turns for version, _ in turn["versions"]}
        assert versions == {max(0, n - 1 - 1)}, f"iteration {n} trains version {n - 1}"
    compared = [row["staleness/tokens_0"] for row in rows(whole)[1:]]
    assert compared == [1, 0, 0], "rollout.max_mismatch is checked in the first iteration alone"
    continued = shutil.copytree(whole, whole.with_name("continued"))
    shutil.rmtree(continued / "checkpoints" / "step_3")
    run("continued", *given, "--resume")
    assert rows(continued) == rows(whole)
    assert weights(continued, 3) == weights(whole, 3) != weights(whole, 2)


def test_the_rows_have_the_metrics_of_both_sides(asynchronous: Path) -> None:
    given = [json.loads(x) for x in (asynchronous / "metrics.jsonl").read_text().splitlines()][1:]
    assert not [name for row in given for name in undocumented(row)]
    for row in given:
        assert row["serving/replicas"] == 1 and 0 < row["serving/step_share"] < 1
        assert 0 <= row["serving/idle_share"] < 1 and 0 <= row["serving/trainer_idle_share"] < 1
    assert sum(row["serving/recomputed_tokens"] for row in given) > 0
    assert sum(row["rollout/resampled"] for row in given) > 0, "the audit is of a run without drops"
    trained = sum(row["rollout/action_tokens"] for row in given)
    assert sum(row["serving/generated_tokens"] for row in given) >= trained


def test_every_log_prob_is_that_of_the_version_that_its_token_names(asynchronous: Path) -> None:
    assert "passed; " in start(["audit", str(asynchronous)])


@pytest.mark.long
def test_the_audit_finds_blocks_that_new_weights_have_not_emptied(run: Run) -> None:
    given = (*SERVED, *BUSY, "rollout.max_mismatch=100")  # which would find it first
    planted = run("stale", *given, LATE="0.05", PLANT="1")
    assert "FAILED: log-probs differ; " in start(["audit", str(planted)], status=1)


def test_a_resumed_run_continues_the_turns_that_were_in_progress(run: Run) -> None:
    """The checkpoint of the last iteration has episodes in progress, some of them within a turn. With a bound
    of 2, or slow tools, the replica of a busy machine may have nothing to generate then."""
    given = (*SERVED, *BUSY, "serving.max_staleness=8", "run.keep_every=1")
    folder = run("continues", *given, "run.iterations=2")
    _, unfinished = decode_episodes((folder / "checkpoints" / "step_2" / EPISODES).read_bytes())
    turns = [t for one in unfinished for h in unpack_record(one.record) for t in h.turns]
    assert any(turn.reason is None for turn in turns), "a turn that is not complete"
    run(folder.name, *given, "--resume")
    played = [(t["token_ids"], t["rollout_logprob"], t["versions"]) for t in turns_of(folder)]
    waiting, _ = decode_episodes((folder / "checkpoints" / f"step_{ITERATIONS}" / EPISODES).read_bytes())
    for turn in (turn for done in waiting for turn in done.trajectory.turns):
        played.append((list(turn.token_ids), list(turn.rollout_logprob), turn.versions))
    for turn in turns:
        count = len(turn.token_ids)
        assert any(
            tuple(tokens[:count]) == turn.token_ids
            and logprobs[:count] == pytest.approx(turn.logprobs, abs=1e-6)
            and versions[0][0] == turn.versions[0][0]
            for tokens, logprobs, versions in played
        )


@pytest.mark.long
@pytest.mark.parametrize("sync", ["adapter", "merged"])
def test_replicas_pass_adapters_on(run: Run, sync: str) -> None:
    given = ("serving.timeout=60", "serving.replicas=2", "model.lora.rank=4", f"model.lora.sync={sync}")
    folder = run(f"lora-{sync}", *given, *BUSY, LATE="0.05")
    assert 0 < max(ages_of(folder)) <= 2, "some tokens are of older adapters"
    said = start(["audit", str(folder)])
    assert "passed; " in said and "not audited" not in said
