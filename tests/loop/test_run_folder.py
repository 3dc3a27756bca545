"""The folder of a run belongs to one run, and to one process at a time: the program as a user starts it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.loop import small_run


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run.write(tmp_path_factory.mktemp("folder"))


def train(config: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """One rank, to its end; without an engine where the folder is refused."""
    line = command(config, *arguments)
    return subprocess.run(line, capture_output=True, text=True, env=small_run.ENVIRONMENT, timeout=240)


def command(config: Path, *arguments: str) -> list[str]:
    one_rank = ("parallel.tensor=1", *arguments)
    return [sys.executable, "-m", "megatron_stppo", "train", str(config), *one_rank]


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_name_is_not_used_again_and_a_mistyped_one_is_not_resumed(config: Path) -> None:
    run = config.parent / "runs" / "held"
    (run / "trajectories").mkdir(parents=True)
    (run / "config.yaml").write_text("run: {name: held}\n")
    (run / "metrics.jsonl").write_text('{"iteration": 1}\n')
    before = files(config.parent)
    again, mistyped = train(config, "run.name=held"), train(config, "run.name=hold", "--resume")
    assert (again.returncode, again.stderr) == (
        2,
        f"megatron-stppo: run.name=held: {run} holds metrics.jsonl; give --resume to continue that run, or "
        "another run.name\n",
    )
    assert (mistyped.returncode, mistyped.stderr) == (
        2,
        f"megatron-stppo: run.name=hold: --resume, but {run.with_name('hold')} holds no run; did you mean "
        "run.name=held? To start a new run, leave --resume out\n",
    )
    assert files(config.parent) == before
    assert not run.with_name("hold").exists()


def test_two_trainings_of_one_name_do_not_run_at_the_same_time(config: Path) -> None:
    lock = config.parent / "runs" / "shared" / "lock"
    with started(config, "run.name=shared") as first:
        wait_for_holder(lock, first.pid)
        second = train(config, "run.name=shared")
        assert (second.returncode, second.stderr) == (
            2,
            f"megatron-stppo: run.name=shared: {lock.parent} is in use by process {first.pid} on "
            f"{socket.gethostname()}; wait until it ends, or give another run.name\n",
        )
    assert first.returncode == -signal.SIGKILL
    with started(config, "run.name=shared") as third:
        wait_for_holder(lock, third.pid)


@contextmanager
def started(config: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A training under way, which is killed at the end."""
    line = command(config, *arguments)
    with subprocess.Popen(line, stderr=subprocess.DEVNULL, env=small_run.ENVIRONMENT) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for_holder(lock: Path, process: int) -> None:
    deadline = time.monotonic() + 120
    while not lock.exists() or f'"process": {process},' not in lock.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
