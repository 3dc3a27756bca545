"""A replica and a trainer are killed, in a process that imports once and forks; `make chaos` kills more."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from megatron_stppo.cluster.launch import process
from tests.training.loop import small_run

SMALL = ("run.iterations=4", "parallel.tensor=1", "run.evaluate_every=0", "rollout.engine_restarts=1")
PATIENCE = 120.0  # seconds


def disturbed(root: Path, hold: Path) -> dict[str, Any]:
    """Kill a replica that waits for its tools, and after the first checkpoint the trainer; then resume."""
    os.environ |= small_run.ENVIRONMENT | {"HOLD": str(hold)}
    config = small_run.write(root)
    process.prepare()
    import torch

    from tests.chaos import drawn_tasks, killed_serving
    from tests.chaos.attempt import Attempt

    torch.set_num_threads(1)
    killed_serving.write_tasks(root / "many.jsonl", root / "tasks.jsonl")
    given, arguments = killed_serving.opened(config, "killed", "completion", *SMALL)
    hold.touch()
    attempt = Attempt(given, arguments)
    try:
        until(attempt, attempt.is_full)
        time.sleep(1.0)  # it gets episodes when the trainer has noted that it has joined
        seen: dict[str, Any] = {"ports": attempt.listening()}
        assert attempt.kill("replica-0")
        until(attempt, lambda: attempt.replaced(seen["ports"]))
        hold.unlink()
        until(attempt, lambda: (given.run.folder / "checkpoints" / "LATEST").exists())
        hold.touch()
        assert attempt.kill("rank-0")
        seen["killed"] = attempt.end()
    finally:
        attempt.kill_all()
    hold.unlink()
    again = Attempt(given, [*arguments, "--resume"])
    try:
        seen["resumed"] = again.end()
    finally:
        again.kill_all()
    seen["tasks"] = drawn_tasks.check(given)
    trained = [drawn_tasks.trained_on(given, iteration) for iteration in range(1, 5)]
    swapped, twice, lost = [*trained[::-1]], [trained[0], *trained[:3]], trained[1:]
    for planted in (twice, lost):
        with pytest.raises(AssertionError, match="trained twice"):
            drawn_tasks.all_but_open(given, planted)
    with pytest.raises(AssertionError, match="iteration 1 trained on"):
        drawn_tasks.in_order(given, swapped)
    return seen | {"reassigned": killed_serving.reassigned(given.run.folder), "log": again.log.read_text()}


def until(attempt: Any, is_true: Callable[[], object]) -> None:
    while not is_true():
        assert attempt.goes_on() and attempt.clock.now() < PATIENCE, attempt.log.read_text()
        time.sleep(0.05)


@pytest.mark.long
def test_each_task_is_trained_on_as_often_as_drawn_although_a_replica_and_the_trainer_are_killed(
    tmp_path: Path,
) -> None:
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        seen = pool.submit(disturbed, tmp_path, tmp_path / "hold").result()
    assert seen["reassigned"] == 3, "the episodes in progress of the replica"
    complete, orphaned, _ = seen["killed"]
    assert not complete and orphaned < 30, "its replicas ended by themselves"
    assert seen["tasks"] == 16 and seen["resumed"][0] and "resumed from step_" in seen["log"]
