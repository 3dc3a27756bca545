"""attempt.sh starts replicas beside training, under a fake Slurm with fake ranks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.slurm import cluster

TRAINING = "--distribution=block --cpu-bind=none --kill-on-bad-exit=0 --wait=120"


@dataclass(frozen=True)
class Ended:
    code: int  # of the job
    said: list[str]  # lines of attempt.sh in the job's output
    folder: Path

    def served(self) -> list[list[str]]:
        """Return (process ID, attempt, step, MASTER_PORT, name) of every rank of a replica, in order."""
        lines = (self.folder / "ends/served").read_text().splitlines()
        return [[*line.split()[:4], line.split()[-1]] for line in lines]

    def steps(self) -> list[str]:
        """Return srun's options of every step of the first attempt."""
        lines = (self.folder / "slurm/steps").read_text().splitlines()
        return [line.removeprefix("0 ").strip() for line in lines if line.startswith("0 ")]


def run(folder: Path, *ends: str, **variables: str) -> Ended:
    """Run a job of 3 nodes with 2 GPUs each. Training's attempts end with "CODE STEP"."""
    code, text = cluster.run(folder, ends, "--nodes=3", "--ntasks-per-node=2", **variables)
    return Ended(code, re.findall(r" job \S+: (.*)", text) or text.splitlines(), folder)


def is_running(pid: str) -> bool:
    return psutil.pid_exists(int(pid)) and psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE


def test_the_first_nodes_train_and_each_replica_is_a_step_on_the_others(tmp_path: Path) -> None:
    job = run(tmp_path, "0 6", REPLICAS="3", AWAIT="3", MASTER_ADDR="node", MASTER_PORT="29500")
    assert job.code == 0
    (training,) = (step for step in job.steps() if "--exact" not in step)
    assert training == f"{TRAINING} --nodes=1 --relative=0 --ntasks=2"
    replicas = [step for step in job.steps() if "--exact" in step]
    own = "--ntasks=1 --ntasks-per-node=1 --gpus-per-node=1 --cpus-per-task=2 --mem=0"
    own += " --wait=30 --open-mode=append"
    assert sorted(replicas) == [f"{TRAINING} --exact --nodes=1 --relative={n} {own}" for n in (1, 1, 2)]
    assert sorted(name for *_, name in job.served()) == ["replica-0", "replica-1", "replica-2"]
    assert {port for *_, port, _ in job.served()} == {"none"}, "that is the trainer's store"
    (arguments,) = set((tmp_path / "ends/arguments").read_text().splitlines())
    assert " serving.replicas=3 serving.start=false rollout.engine_tensor=1 model.path=" in arguments


def test_a_replica_that_dies_is_started_again_and_all_end_with_training(tmp_path: Path) -> None:
    (tmp_path / "ends").mkdir()
    (tmp_path / "ends/replica-0.codes").write_text("1\n137\n")
    (tmp_path / "ends/replica-1.codes").write_text("2\n")
    job = run(tmp_path, "85 3", "0 6", REPLICAS="2", AWAIT="4", REPLICA_EVERY="0")
    starts = [name for _, attempt, *_, name in job.served() if attempt == "0"]
    assert job.code == 0
    assert starts.count("replica-0") == 3
    assert starts.count("replica-1") == 1, "2 is a wrong configuration, with which a new one would end too"
    assert not [pid for pid, *_ in job.served() if is_running(pid)]
    codes = [line.partition(";")[0] for line in job.said if line.startswith("replica-0")]
    assert codes[:2] == ["replica-0: exit code 1", "replica-0: exit code 137"]
    log = (tmp_path / "job/attempts/4711.0/replica-0.rank-0.log").read_text()
    assert log == "attempt 0\n" * 3, "a new start does not replace the output of the last one"


def test_a_replica_that_does_not_end_is_killed(tmp_path: Path) -> None:
    job = run(tmp_path, "0 6", REPLICAS="1", AWAIT="1", REPLICA_GRACE="1", STUBBORN="1")
    assert job.code == 0
    ((pid, *_),) = job.served()
    assert not is_running(pid)


@pytest.mark.parametrize("replicas", [{}, {"REPLICAS": "0"}])
def test_without_replicas_all_nodes_train(tmp_path: Path, replicas: dict[str, str]) -> None:
    job = run(tmp_path, "0 6", **replicas)
    assert (job.code, job.steps()) == (0, [TRAINING])
    arguments = (tmp_path / "ends/arguments").read_text().splitlines()
    assert len(arguments) == 6
    assert not [line for line in arguments if "serving" in line]


@pytest.mark.parametrize(
    ("given", "trains"),
    [
        ({"REPLICAS": "6"}, "0"),
        ({"REPLICAS": "3", "TRAIN_NODES": "2"}, "2"),
        ({"REPLICAS": "1", "REPLICA_GPUS": "4"}, "3"),
    ],
)
def test_replicas_that_do_not_fit_give_one_line_and_exit_code_2(
    tmp_path: Path, given: dict[str, str], trains: str
) -> None:
    job = run(tmp_path, "0 6", **given)
    assert job.code == 2
    (line,) = job.said
    assert f"TRAIN_NODES={trains}: do not fit on 3 nodes of 2 GPUs" in line


def test_replicas_run_in_the_image_too(tmp_path: Path) -> None:
    image = tmp_path / "image.sqsh"
    image.touch()
    job = run(tmp_path, "0 6", REPLICAS="2", REPLICA_GPUS="2", AWAIT="4", IMAGE=str(image))
    assert job.code == 0
    nodes = {word for step in job.steps() for word in step.split() if word.startswith("--relative=")}
    assert nodes == {"--relative=0", "--relative=1", "--relative=2"}, "a replica of 2 GPUs takes a node"
    commands = [path.read_text().splitlines()[-1] for path in (tmp_path / "slurm").glob("container*")]
    program = f"{cluster.HERE / 'program'} -P -m megatron_stppo"
    assert sorted(command.split(" --name ")[-1] for command in commands if "serve" in command) == [
        "replica-0",
        "replica-1",
    ]
    assert all(command.startswith(f"{program} ") for command in commands)
