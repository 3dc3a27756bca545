"""What the first rank of an engine group sends between two engine steps, on two ranks without an engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megatron_stppo.base.errors import Abandoned, ToolsStayAway
from megatron_stppo.base.types import Message, Task
from megatron_stppo.cluster.preemption import PreemptionNotice
from megatron_stppo.environments.base import StepResult
from megatron_stppo.parallel.abandon import on_any_rank
from megatron_stppo.rollout.episodes.collect import _combined, _report, answers_of, wait_for_all
from megatron_stppo.rollout.episodes.environment_host import Answer, EnvironmentHost
from megatron_stppo.rollout.vllm.generation import EngineFailure, RolloutError
from tests.ranks import run_ranks

ANSWER = Answer(3, result=StepResult("", 0.0, True, False, 0, "error", "the board fell over"))
SAID: tuple[Any, ...] = ((), (), (ANSWER, ANSWER), (), RolloutError("the host failed"))


def listen() -> list[tuple[Any, int]]:
    """Return, for each of SAID, what this rank got and the number of collectives that it took."""
    left = iter(SAID)

    def take(wait_for: int) -> Any:
        said = next(left)
        if isinstance(said, RolloutError):
            raise said
        return said

    host: Any = SimpleNamespace(take=take) if dist.get_rank() == 0 else None
    got = []
    for _ in SAID:
        before = _collectives()
        try:
            heard: Any = answers_of(host, 0, None)
        except RolloutError as error:
            heard = str(error)
        got.append((heard, _collectives() - before))
    return got


def _collectives() -> int:
    return int(dist.group.WORLD._get_sequence_number_for_group())


def test_a_step_without_answers_costs_one_broadcast_and_one_with_answers_two() -> None:
    first, second = run_ranks(listen, 2)
    assert first == second
    assert first == [((), 1), ((), 1), ((ANSWER, ANSWER), 2), ((), 1), ("the host failed", 2)]


class Slow:
    """Answers after a minute, in a thread that cannot be cancelled."""

    stop_strings: tuple[str, ...] = ()

    async def reset(self, task: Task, seed: int) -> list[Message]:
        await asyncio.to_thread(time.sleep, 60)
        return []

    async def step(self, action: str) -> StepResult:
        raise AssertionError("it never begins")

    async def close(self) -> None: ...


def leave(signalled: int, together: bool, done: int) -> tuple[str, float]:
    """Wait for an environment while one rank gets SIGTERM. Return why this rank left, and after how long.

    together: both ranks are of one engine; otherwise each has an engine and environments of its own.
    done: a rank whose own episodes have ended.
    """
    rank, notice = dist.get_rank(), PreemptionNotice(0)
    stop = on_any_rank(notice.now)
    groups = [None, None] if together else [dist.new_group([0]), dist.new_group([1])]
    host = None
    if rank == 0 or not together:
        host = EnvironmentHost(Slow, concurrency=1, deadline=90)
    dist.barrier()
    began = time.monotonic()
    if rank == signalled:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    if rank != done:
        with pytest.raises(Abandoned), host or contextlib.nullcontext():
            if host:
                host.reset(0, Task("t", (), (), "evaluate", 0), 1)
            answers_of(host, 1, groups[rank], stop)
    wait_for_all(stop)
    return stop(), time.monotonic() - began


@pytest.mark.parametrize(("signalled", "together", "done"), [(0, False, -1), (0, False, 0), (1, True, -1)])
def test_a_signal_to_one_rank_ends_the_wait_for_an_environment_on_all(
    signalled: int, together: bool, done: int
) -> None:
    ended = run_ranks(leave, 2, signalled, together, done, timeout=60)
    assert {why for why, _ in ended} <= {"SIGTERM", "another rank received notice"}
    assert all(seconds < 20 for _, seconds in ended)


def test_an_abandoned_evaluation_counts_as_one_also_if_another_rank_failed() -> None:
    left, broken = _report(Abandoned("SIGTERM")), _report(EngineFailure("lost", "step 3"))
    away, crash = _report(ToolsStayAway("no tools")), _report(ValueError("a bug"))
    assert left and broken and away and crash
    for reports in ({0: left}, {0: broken, 1: left}, {0: away, 3: left}):
        assert str(_combined(None, reports)) == "SIGTERM"
        assert isinstance(_combined(None, reports), Abandoned)
    assert isinstance(_combined(None, {0: left, 1: crash}), RolloutError)
