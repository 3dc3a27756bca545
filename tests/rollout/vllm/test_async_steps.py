"""The engine with vLLM's asynchronous scheduler and a queue of two steps, as on a GPU, but on a CPU.

vLLM begins a step before it returns the tokens of the step before. So when a turn ends, a step that still
computes a token for it is under way, and the episode's next turn starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_stppo.base.types import Trajectory
from tests.rollout.episodes.failing import fail_in_step
from tests.rollout.episodes.test_collect import SETTINGS, TASKS, check_against, player, refused
from tests.rollout.vllm import test_in_flight
from tests.rollout.vllm.tiny import CONTEXT


def observe(folder: Path) -> dict[str, Any]:
    schedule_asynchronously()
    from megatron_stppo.rollout.vllm.engine import Engine, EngineSettings

    engine = Engine(EngineSettings(folder, max_context=CONTEXT, max_sequences=48, kv_cache_gib=0.05))
    core = engine._core.engine_core
    seen: dict[str, Any] = {"scheduler": type(core.scheduler).__name__, "queue": core.batch_queue.maxlen}
    play, stale = player(engine, folder, 1), count_stale(engine)
    seen["first"], seen["queue after"] = play(TASKS), len(core.batch_queue)
    seen["again"], seen["stale"] = play(TASKS), len(stale)
    seen["overlapped"] = play(TASKS, replace(SETTINGS, overlap_tools=True))
    for number in range(3):
        engine.add(str(number), tuple(range(5, 60)), seed=number, max_tokens=50)
    for _ in range(4):
        engine.step()
    seen["queue while running"] = len(core.batch_queue)
    engine.abort_all()
    seen["queue after abort"], seen["unfinished"] = len(core.batch_queue), core.scheduler.has_requests()
    engine.sleep()
    engine.wake()
    engine.refresh()
    seen["after abort"] = play(TASKS)
    seen["in flight"] = test_in_flight.observe(engine, folder)
    fail_in_step(9)
    seen["broken"] = refused(play)[0]
    return seen


def schedule_asynchronously() -> None:
    """Undo vLLM's choice for a CPU, which is no asynchronous scheduling."""
    from vllm.platforms.cpu import CpuPlatform

    choose = CpuPlatform.check_and_update_config

    def asynchronous(cls: type, config: Any) -> None:
        choose(config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(asynchronous)  # type: ignore[assignment]


def count_stale(engine: Any) -> list[str]:
    """The ids of requests that are added while a step for an earlier request of the same id is under way."""
    add: Callable[..., None] = engine.add
    stale: list[str] = []

    def counting(request_id: str, token_ids: Sequence[int], **options: Any) -> None:
        queue = engine._core.engine_core.batch_queue
        under_way = [vllm_id for _, step, _ in queue for vllm_id in step.num_scheduled_tokens]
        stale.extend([request_id] * (request_id in [vllm_id.split("/")[0] for vllm_id in under_way]))
        add(request_id, token_ids, **options)

    engine.add = counting
    return stale


@pytest.fixture(scope="module")
def seen(seen_asynchronous: dict[str, Any]) -> dict[str, Any]:
    return seen_asynchronous


def turns(played: list[Trajectory]) -> list[list[tuple[int, ...]]]:
    return [[turn.token_ids for turn in trajectory.turns] for trajectory in played]


def test_a_token_of_a_finished_turn_never_reaches_the_next_turn(
    seen: dict[str, Any], seen_alone: dict[str, Any]
) -> None:
    assert (seen["scheduler"], seen["queue"]) == ("AsyncScheduler", 2)
    assert seen["stale"] > 0, "no turn began while a step for the turn before was under way"
    assert turns(seen["first"]) == turns(seen_alone["collect"]["first"])


def test_asynchronous_steps_repeat_and_replay_in_transformers(seen: dict[str, Any], reference: Any) -> None:
    assert seen["first"] == seen["again"]
    check_against(reference, seen["first"])
    check_against(reference, seen["overlapped"])


def test_nothing_is_under_way_after_a_rollout_or_an_abort(seen: dict[str, Any]) -> None:
    assert seen["queue after"] == 0
    assert seen["queue while running"] > 0
    assert (seen["queue after abort"], seen["unfinished"]) == (0, False)
    assert seen["after abort"] == seen["first"]


def test_failure_with_a_step_under_way_is_an_engine_failure(seen: dict[str, Any]) -> None:
    assert "EngineFailure: vLLM failed: MemoryError" in seen["broken"]
