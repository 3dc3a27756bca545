"""The whole program as steps of one job: training on one node, a replica on another, under a fake Slurm."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path

import psutil
import pytest

from tests.slurm import cluster
from tests.training.loop import small_run


def address() -> str:
    """Return an IPv4 address of this machine that is not of the loopback interface."""
    found = [one for of in psutil.net_if_addrs().values() for one in of if one.family == socket.AF_INET]
    others = [one.address for one in found if not one.address.startswith("127.")]
    if not others:
        pytest.skip("this machine has no other interface than the loopback")
    return others[0]


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 240
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} does not appear"
        time.sleep(0.05)


def last_lines(run: Path) -> str:
    return "".join(f"{path}:\n{path.read_text()[-2000:]}\n" for path in run.glob("attempts/latest/*.log"))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_replica_serves_until_the_trainer_has_left_and_serves_the_next_attempt_too(tmp_path: Path) -> None:
    config = small_run.write(tmp_path)
    text = (cluster.SCRIPTS / "qwen2.5-7b.sbatch").read_text()
    fields = f"{config} parallel.tensor=1 serving.address={address()} run.iterations=8"
    script = tmp_path / "job.sbatch"
    script.write_text(text.replace("examples/qwen2.5-7b/config.yaml", fields))
    variables = {"MODEL": str(tmp_path / "model"), "ROOT": str(tmp_path / "runs"), "REPLICAS": "1"}
    variables |= {"PYTHONPATH": str(small_run.ROOT), "REPLICA_EVERY": "0"}
    options = ("--job-name=job", "--nodes=2", "--ntasks-per-node=1")
    run = tmp_path / "runs" / "job"
    with cluster.submit(tmp_path / "slurm", script, *options, **variables) as job:
        wait_for(run / "trajectories" / "iteration-00001.jsonl")
        for tasks in job.folder.glob("pids.0*"):  # Slurm sends it to all steps
            os.kill(int(tasks.read_text()), signal.SIGUSR1)
        wait_for(job.folder / "codes.0")
        ended = "the replica has ended: the run has ended"
        deadline = time.monotonic() + 60  # the replica ends after the trainer
        while ended not in (logs := last_lines(run)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert (job.folder / "codes.0").read_text() == "85\n", logs
        assert ended in logs, "the signal must not end it"
        (job.folder / "go.0").touch()
        assert job.process.wait(400) == 0, logs + (job.folder / "job.out").read_text()
    assert json.loads((run / "exit.json").read_text()) == {"code": 0, "reason": "done"}
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 8
    codes = {path.name.split(".")[1]: path.read_text() for path in job.folder.glob("codes.*.exact.*")}
    assert codes == {"0": "0\n", "1": "0\n"}, "one start in each attempt, which the trainer ends"
