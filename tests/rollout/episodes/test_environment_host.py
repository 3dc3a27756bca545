from __future__ import annotations

import asyncio
import logging
import sys
import time

import pytest

from megatron_stppo.base.types import Message, Task
from megatron_stppo.environments.base import StepResult
from megatron_stppo.rollout.episodes import environment_host
from megatron_stppo.rollout.episodes.environment_host import Answer, EnvironmentHost
from megatron_stppo.rollout.vllm.generation import RolloutError
from tests.rollout.vllm.tiny import Game, task


class Watched(Game):
    """Counts concurrent calls and closed environments."""

    under_way = most = closed = 0

    async def step(self, action: str) -> StepResult:
        Watched.under_way += 1
        Watched.most = max(Watched.most, Watched.under_way)
        await asyncio.sleep(0.01)
        Watched.under_way -= 1
        return StepResult(action, 0.0, False, True, False)

    async def close(self) -> None:
        await asyncio.sleep(0.01)
        Watched.closed += 1


class Blocking(Game):
    async def reset(self, task: Task, seed: int) -> list[Message]:
        time.sleep(1.5)  # a common mistake of users: an async function that does not await
        return []


def ending(answer: Answer) -> tuple[str | None, str]:
    assert answer.result is not None
    return answer.result.outcome, answer.result.detail


def test_answers_come_in_order_of_submission_when_all_are_awaited() -> None:
    with EnvironmentHost(Game, concurrency=8, deadline=5) as host:
        for index in range(6):
            host.reset(index, task(index), seed=0)
        assert [answer.index for answer in host.take(6)] == list(range(6))
        for index in (4, 2, 0):
            host.step(index, "x" * index)
        assert [answer.index for answer in host.take(3)] == [4, 2, 0]


def test_reset_answers_with_messages_and_stop_strings() -> None:
    with EnvironmentHost(Game, concurrency=1, deadline=5) as host:
        host.reset(0, task(0), seed=0)
        [answer] = host.take(1)
    assert answer == Answer(0, task(0).prompt, ("e", "</answer>"))


def test_an_exceeded_deadline_is_a_timeout_and_does_not_affect_other_calls() -> None:
    with EnvironmentHost(Game, concurrency=8, deadline=0.3) as host:
        host.reset(0, task(0, "hang"), seed=0)
        host.reset(1, task(1), seed=0)
        host.take(2)
        host.step(0, "a")
        host.step(1, "a")
        slow, quick = host.take(2)
    assert ending(slow) == ("timeout", "no answer within 0.3 s")
    assert ending(quick) == (None, "")


def failures(host: EnvironmentHost, behave: str, first: int) -> list[Answer]:
    """Play three episodes, and return the answers to their first steps."""
    for index in range(first, first + 3):
        host.reset(index, task(index, behave), seed=0)
    host.take(3)
    for index in range(first, first + 3):
        host.step(index, "a")
    return host.take(3)


def test_a_kind_of_failure_is_logged_once_in_one_line_with_its_place_until_the_next_rollout(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO), EnvironmentHost(Game, concurrency=1, deadline=5) as host:
        for first in (0, 3):
            for answer in failures(host, "raise", first):
                assert ending(answer) == ("error", "RuntimeError: the board fell over  [31m")
        failures(host, "return nothing", 6)
        host.renew_patience()
        failures(host, "raise", 9)
    raised, nothing, again = (record.getMessage() for record in caplog.records)
    assert raised.startswith(
        "episode 0: environment failed: RuntimeError: the board fell over  [31m (tiny.py:"
    )
    assert raised.endswith(" in step)")
    wrong = "WrongValue: Game.step(): returned None; return an environments.base.StepResult"
    assert nothing == f"episode 6: environment failed: {wrong}"
    assert again.startswith("episode 9: environment failed: RuntimeError: the board fell over")


@pytest.mark.parametrize(
    ("behave", "detail"),
    [
        ("cancel", "CancelledError: "),
        ("exit", "SystemExit: 3"),
        ("interrupt", "KeyboardInterrupt: "),
        ("end otherwise", "End: over"),
        ("a task exits", "SystemExit: 4"),
        ("unreadable", "Unreadable: its text cannot be read"),
    ],
)
def test_whatever_an_environment_raises_is_an_error_of_its_episode_at_once(behave: str, detail: str) -> None:
    with EnvironmentHost(Game, concurrency=8, deadline=5) as host:
        for index, way in enumerate((behave, "play")):
            host.reset(index, task(index, way), seed=0)
        host.take(2)
        for index in range(2):
            host.step(index, "a")
        ended, other = host.take(2)
    assert ending(ended) == ("error", detail)
    assert ending(other) == (None, "")


def test_a_result_of_the_wrong_type_is_an_outcome_and_a_class_of_the_wrong_kind_is_misuse() -> None:
    with EnvironmentHost(Game, concurrency=8, deadline=5) as host:
        for index, behave in enumerate(("return nothing", "step is not async")):
            host.reset(index, task(index, behave), seed=0)
        host.take(2)
        for index in range(2):
            host.step(index, "a")
        nothing, plain = host.take(2)
    wrong = "WrongValue: Game.step(): returned None; return an environments.base.StepResult"
    assert ending(nothing) == ("error", wrong) and nothing.misuse == ""
    assert (plain.result, plain.misuse) == (None, "Game.step(): cannot be awaited; write `async def step`")


def test_an_environment_that_computes_lets_the_engines_thread_continue_ten_times_as_soon() -> None:
    before = sys.getswitchinterval()
    with EnvironmentHost(Game, concurrency=1, deadline=30):
        assert sys.getswitchinterval() == pytest.approx(before / 10)
    assert sys.getswitchinterval() == before
    with pytest.raises(RuntimeError), EnvironmentHost(Game, concurrency=1, deadline=30) as host:
        host.__enter__()  # its thread has started already
    assert sys.getswitchinterval() == before


def test_concurrency_bounds_the_calls_in_progress() -> None:
    Watched.under_way = Watched.most = 0
    with EnvironmentHost(Watched, concurrency=3, deadline=5) as host:
        for index in range(10):
            host.reset(index, task(index), seed=0)
        host.take(10)
        for index in range(10):
            host.step(index, "a")
        host.take(10)
    assert Watched.most == 3


def test_every_environment_is_closed_at_the_end_even_with_a_call_in_progress() -> None:
    Watched.closed = 0
    with EnvironmentHost(Watched, concurrency=8, deadline=5) as host:
        for index in range(4):
            host.reset(index, task(index), seed=0)
        host.take(4)
        host.close(0)
        host.step(1, "a")
    assert Watched.closed == 4


def test_an_environment_that_blocks_the_event_loop_is_named_instead_of_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(environment_host, "PATIENCE", 0.4)
    monkeypatch.setattr(environment_host, "BEAT", 0.1)
    with EnvironmentHost(Blocking, concurrency=1, deadline=0.3) as host:
        host.reset(0, task(0), seed=0)
        with pytest.raises(RolloutError, match="blocked the event loop"):
            host.take(1)
