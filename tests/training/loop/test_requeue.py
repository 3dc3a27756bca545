"""The whole program under sbatch and srun: signal to one rank, requeue, resume, with the same final bits."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from megatron_stppo.checkpoint.step_folder import compare, inspect
from megatron_stppo.cluster.launch.process import free_port
from tests.forking import stand_in
from tests.slurm import cluster
from tests.training.loop import small_run
from tests.training.loop.test_resume import rows

FIRST = Path("trajectories/iteration-00001.jsonl")


def submit(root: Path, config: Path, name: str, ranks: int, **variables: str) -> cluster.Job:
    """Submit examples/slurm/qwen2.5-7b.sbatch with the small configuration."""
    text = (cluster.SCRIPTS / "qwen2.5-7b.sbatch").read_text()
    script = root / f"{name}.sbatch"
    script.write_text(text.replace("examples/qwen2.5-7b/config.yaml", str(config)))
    paths = {"MODEL": str(root / "model"), "ROOT": str(root / "runs")}
    paths["MASTER_PORT"] = free_port()  # the job's default port is the same in all tests
    paths["PYTHONPATH"] = str(small_run.ROOT)  # the small run's environment is a module of the tests
    paths["PYTHON"] = stand_in.python()
    options = (f"--job-name={name}", f"--ntasks-per-node={ranks}")
    return cluster.submit(root / f"slurm-{name}", script, *options, **paths, **variables)


def pester(pid: int, path: Path) -> None:
    """Wait for `path`, then send the process both signals repeatedly until it ends."""
    wait_for(path)
    while True:
        try:
            os.kill(pid, signal.SIGUSR1)
            time.sleep(0.02)
            os.kill(pid, signal.SIGTERM)
        except ProcessLookupError:
            return


def wait_for(path: Path, seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} does not appear"
        time.sleep(0.02)


def leave(run: Path, job: cluster.Job, ranks: int) -> None:
    """Signal the second rank alone, and check that all ranks write one common checkpoint and exit."""
    wait_for(job.folder / "pids.0")
    pester(int((job.folder / "pids.0").read_text().split()[1]), run / FIRST)
    wait_for(job.folder / "codes.0")
    logs = [(run / "attempts" / "4711.0" / f"rank-{rank}.log").read_text() for rank in range(ranks)]
    assert (job.folder / "codes.0").read_text().split() == ["85"] * ranks, logs[1][-3000:]
    (step,) = (run / "checkpoints").glob("step_*")
    assert step.name in ("step_1", "step_2"), (
        "left at the end of the iteration, not at the third's checkpoint"
    )
    assert not compare(step, inspect(step).items())
    note = json.loads((run / "exit.json").read_text())
    assert (note["code"], note["reason"].partition(" ")[0]) == (85, step.name)
    assert '"SLURM_PROCID": "1"' in logs[1]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_notice_to_one_rank_leads_to_a_checkpoint_a_requeue_and_the_same_final_bits(
    straight: tuple[Path, Path], ranks: int
) -> None:
    config, reference = straight
    root, name = config.parent, f"requeued{ranks}"
    if ranks == 4:
        reference = root / "runs" / "straight4"
        small_run.run_command(("train", str(config), "run.name=straight4"), ranks=4).succeeded()
    run = root / "runs" / name
    with submit(root, config, name, ranks) as job:
        leave(run, job, ranks)
        played = (run / FIRST).stat().st_mtime_ns
        (job.folder / "go.0").touch()
        assert job.process.wait(600) == 0, (run / "attempts/latest/rank-0.log").read_text()[-3000:]
    assert (run / FIRST).stat().st_mtime_ns == played, "began again instead of resuming"
    assert json.loads((run / "exit.json").read_text()) == {"code": 0, "reason": "done"}
    assert (run / "attempts" / "latest").readlink() == Path("4711.1")
    assert rows(run) == rows(reference)
    assert small_run.tensors(run, 6) == small_run.tensors(reference, 6)
