"""One rank of the whole program is stopped, or killed, in the middle of a run."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.training.loop import small_run

DEADLINE = 20.0
LIMITS = [
    f"deadlines.{name}={DEADLINE}" for name in ("rollout", "score", "advantage", "update", "reshard", "other")
]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run.write(tmp_path_factory.mktemp("stopped"))


def signalled(
    config: Path, name: str, what: signal.Signals, *more: str, world: int = 2
) -> tuple[dict[int, float], str]:
    """Run with the overrides `more`, and send a signal to rank 1.

    Return ({rank: seconds from the signal until the rank ended}, output of the run).
    """
    rows, printed = config.parent / "runs" / name / "metrics.jsonl", config.parent / f"{name}.txt"
    given = (f"run.name={name}", "run.iterations=100000", "run.checkpoint_every=100000", *LIMITS, *more)
    command = [*small_run.torchrun(world, sys.executable), "train", str(config), *given]
    with (
        printed.open("w") as file,
        subprocess.Popen(command, stdout=file, stderr=file, env=small_run.ENVIRONMENT) as launcher,
    ):
        until = time.monotonic() + 240
        while not rows.exists() or len(rows.read_text().splitlines()) < 2:
            assert launcher.poll() is None and time.monotonic() < until, printed.read_text()[-3000:]
            time.sleep(0.1)
        ranks = {int(p.environ()["RANK"]): p for p in psutil.Process(launcher.pid).children()}
        ranks[1].send_signal(what)
        started, ended = time.monotonic(), {}
        while len(ended) < world and time.monotonic() - started < DEADLINE + 90:
            for rank, process in ranks.items():
                if rank not in ended and (
                    not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
                ):
                    ended[rank] = time.monotonic() - started
            time.sleep(0.1)
        assert launcher.wait(60) != 0
    return ended, printed.read_text()


@pytest.mark.long
def test_a_stopped_rank_ends_the_run_and_is_named_with_the_phase(config: Path) -> None:
    ended, told = signalled(config, "stopped", signal.SIGSTOP)
    assert ended[0] < DEADLINE + 30
    assert ended[1] < DEADLINE + 70, "torchrun kills it 30 s after it lost the first rank"
    phase = re.search(r"megatron-stppo: rank 0: phase (\w+) exceeded its deadline of 20 s", told)
    assert phase, told[-3000:]
    assert f"(deadlines.{phase[1]}): rank 1 has been silent since phase " in told
    log = (config.parent / "runs/stopped/logs/rank-0.log").read_text()
    assert "thread MainThread:" in log and "loop.py" in log
    beat = json.loads((config.parent / "runs/stopped/heartbeats/rank-0.json").read_text())
    assert beat["phase"] == phase[1]


@pytest.mark.long
def test_a_killed_rank_ends_the_run_long_before_any_deadline(config: Path) -> None:
    # Each rank has an engine of its own. In an engine of both ranks, vLLM's all-reduce on a CPU waits for the
    # killed one in shared memory, until the deadline.
    ended, _ = signalled(config, "killed", signal.SIGKILL, "rollout.engine_tensor=1")
    assert max(ended.values()) < DEADLINE
