"""The multi-turn loop on a real engine: one rank, two ranks as one engine, two ranks as two replicas."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_stppo.base.types import Task, Trajectory
from megatron_stppo.data.packing import to_batch
from megatron_stppo.rollout.episodes.collect import RolloutSettings, collect, meet
from megatron_stppo.rollout.episodes.episode import Limits
from megatron_stppo.rollout.episodes.play import request_seed
from megatron_stppo.rollout.vllm.generation import RolloutError
from tests.ranks import run_ranks
from tests.rollout.episodes.failing import fail_in_step, sample_wrongly_in_step
from tests.rollout.vllm.tiny import CONTEXT, Game, fill, reference_logprobs, task

LIMITS = Limits(max_prompt_tokens=60, max_turn_tokens=40, max_observation_tokens=30, max_context=CONTEXT)
SETTINGS = RolloutSettings(LIMITS, deadline=5.0, overlap_tools=False)
TASKS = [task(index) for index in range(6)]
SEED = 11
TIMEOUT = timedelta(minutes=50)  # torch's default for gloo is 30


def start(folder: Path, tensor: int) -> Callable[..., list[Trajectory]]:
    from megatron_stppo.rollout.vllm.engine import Engine, EngineSettings

    sizes = {"max_context": CONTEXT, "max_sequences": 16, "kv_cache_gib": 0.05}
    engine = Engine(EngineSettings(folder, tensor=tensor, timeout=TIMEOUT, **sizes))
    return player(engine, folder, tensor)


def player(engine: Any, folder: Path, tensor: int) -> Callable[..., list[Trajectory]]:
    """Return a function that calls `collect` with tasks and settings, on an engine with the checkpoint."""
    fill(engine.parameters(), folder, dist.get_rank() % tensor, tensor)
    engine.published = lambda: 3
    engine.refresh()

    def play(tasks: list[Task], settings: RolloutSettings = SETTINGS, **more: Any) -> list[Trajectory]:
        return collect(engine, tasks, Game, settings, SEED, **more)

    return play


def observe(engine: Any, folder: Path) -> dict[str, Any]:
    play = player(engine, folder, 1)
    progress: list[tuple[int, int]] = []
    seen: dict[str, Any] = {"first": play(TASKS, progress=lambda *ended: progress.append(ended))}
    seen["again"], seen["progress"] = play(TASKS), progress
    seen["overlapped"] = play(TASKS, replace(SETTINGS, overlap_tools=True))
    troubled = [task(0), task(1, "hang"), task(2, "raise"), task(3, "fail at reset"), task(30)]
    seen["troubled"] = play(troubled, replace(SETTINGS, deadline=0.5), groups=[7, 7, 8, 8, 9])
    seen["after"] = play(TASKS)
    undo = fail_in_step(9)
    seen["broken"], seen["unfinished"] = refused(play), engine.unfinished
    undo()
    engine.rebuild()
    seen["rebuilt"] = refused(play)
    seen["renewed"] = player(engine, folder, 1)(TASKS)
    return seen


def refused(play: Callable[..., list[Trajectory]]) -> tuple[str, str]:
    """Return (the exception of a rollout, the place of the engine's failure)."""
    try:
        play(TASKS)
    except Exception as error:
        return f"{type(error).__name__}: {error}", getattr(error, "place", "")
    return "not refused", ""


def observe_pair(folder: Path) -> tuple[list[list[Trajectory]], set[str], list[timedelta]]:
    """(trajectories of three rollouts, names of the mapped shared memory, marked where they are deleted,
    timeouts of the groups over which vLLM and the environments' answers travel)."""
    play = start(folder, 2)
    from vllm.distributed.parallel_state import get_tp_group

    groups = get_tp_group().device_group, get_tp_group().cpu_group
    timeouts = [group._get_backend(torch.device("cpu")).options._timeout for group in groups]
    maps = Path("/proc/self/maps").read_text().splitlines()
    memory = {line.partition("/dev/shm/")[2] for line in maps if "cpushm" in line}
    played = [play(TASKS), play(TASKS), play(TASKS, replace(SETTINGS, overlap_tools=True))]
    return played, memory, timeouts


def observe_replicas(folder: Path) -> tuple[list[Trajectory], str, tuple[str, str]]:
    play, half = start(folder, 1), dist.get_rank() * 3
    mine = play(TASKS[half : half + 3], first_index=half)
    wrong = [task(0, "step is not async" if dist.get_rank() else "play")]
    misuse, _ = refused(lambda _: play(wrong))
    fail_in_step(9 if dist.get_rank() else 0)
    return mine, misuse, refused(play)


@pytest.fixture(scope="module")
def seen(seen_alone: dict[str, Any]) -> dict[str, Any]:
    return seen_alone["collect"]


def check_against(reference: Any, trajectories: list[Trajectory]) -> None:
    """Recompute log-probs to check that the engine's context was the trajectory so far at every turn."""
    for trajectory in trajectories:
        expected = reference_logprobs(reference, trajectory.token_ids)
        replayed = expected[to_batch([trajectory]).action_index_T - 1]
        reported = [value for turn in trajectory.turns for value in turn.rollout_logprob]
        assert reported == pytest.approx(replayed.tolist(), abs=5e-5)


def test_trajectories_replay_in_transformers_token_for_token(seen: dict[str, Any], reference: Any) -> None:
    played: list[Trajectory] = seen["first"]
    assert [t.task.index for t in played] == [0, 1, 2, 3, 4, 5]
    assert any(len(t.turns) == 3 for t in played)
    check_against(reference, played)
    check_against(reference, seen["overlapped"])


def test_the_environment_receives_the_text_of_the_turn(seen: dict[str, Any], tokenizer: Any) -> None:
    """Its answer says how many letters it got. After an end-of-text token the answer is a message."""
    end = tokenizer.eos_token_id
    for trajectory in seen["first"]:
        for turn in trajectory.turns[:-1]:
            ids, answer = turn.token_ids, tokenizer.decode(turn.observation_ids)
            if ids[-1] == end:
                heard = len(tokenizer.decode(ids[:-1]))
                assert answer.startswith(f"\n<|im_start|>user\n\n<information>{heard} letters <|")
                assert answer.endswith("</information>\n<|im_end|>\n<|im_start|>assistant\n")
            else:
                heard = len(tokenizer.decode(ids))
                assert answer.startswith(f"\n<information>{heard} letters <|im_end|>")
            assert turn.observation_ids.count(end) == (ids[-1] == end), "that of the answer's text is text"


def test_outcome_and_reward_come_with_the_last_turn(seen: dict[str, Any]) -> None:
    finished = [t for t in seen["first"] if t.outcome in ("ok", "wrong")]
    assert finished
    for trajectory in finished:
        assert trajectory.reward == trajectory.turns[-1].reward == float(trajectory.outcome == "ok")
        assert (trajectory.tool_calls, trajectory.valid_actions) == (2, 3)
        assert {turn.policy_version for turn in trajectory.turns} == {3}


def test_repeated_run_is_bitwise_equal_when_tools_are_awaited(seen: dict[str, Any]) -> None:
    assert seen["first"] == seen["again"] == seen["after"]


def test_progress_counts_every_episode_once(seen: dict[str, Any]) -> None:
    assert seen["progress"] == [(ended, 6) for ended in range(1, 7)]


def test_failures_are_outcomes_and_do_not_affect_the_other_episodes(seen: dict[str, Any]) -> None:
    good, hung, raised, unset, long = seen["troubled"]
    assert good.outcome in ("ok", "wrong", "truncated")
    assert (hung.outcome, hung.detail) == ("timeout", "no answer within 0.5 s")
    assert (raised.outcome, raised.detail) == ("error", "RuntimeError: the board fell over  [31m")
    assert (unset.outcome, unset.turns) == ("error", ())
    assert (long.outcome, long.turns) == (
        "error",
        (),
    ) and "exceeds rollout.max_prompt_tokens=60" in long.detail
    assert [t.overlong_prompt > 60 for t in seen["troubled"]] == [False] * 4 + [True]
    assert hung.turns and hung.reward == 0.0
    assert [t.group for t in seen["troubled"]] == [7, 7, 8, 8, 9]


def test_an_exception_of_vllm_is_an_engine_failure_with_its_place(seen: dict[str, Any]) -> None:
    said, place = seen["broken"]
    assert place.startswith("rank 0: MemoryError at failing.py:") and place.endswith(" in step 9")
    assert said.startswith(
        "EngineFailure: rollout failed on rank 0: EngineFailure: vLLM failed: MemoryError at"
    )
    assert said.endswith("in step 9: no block is free")
    assert seen["unfinished"] == 0


def test_new_engine_refuses_traffic_until_weights_are_published_and_then_plays_the_same(
    seen: dict[str, Any],
) -> None:
    assert "no weights were published to the engine" in seen["rebuilt"][0]
    assert seen["renewed"] == seen["first"]


def test_two_ranks_as_one_engine_agree_bitwise_and_leave_no_names_of_shared_memory(
    tiny_folder: Path, reference: Any
) -> None:
    (first, memory, timeouts), (second, _, _) = run_ranks(observe_pair, 2, tiny_folder, timeout=240)
    assert timeouts == [TIMEOUT, TIMEOUT], "a tool may be waited for longer than torch's default"
    assert bool(memory) is torch.cpu._is_avx512_supported(), "vLLM's AVX2 build exchanges over gloo instead"
    assert all(name.endswith(" (deleted)") for name in memory), "a killed run would leave it"
    assert first == second
    awaited, again, overlapped = first
    assert awaited == again
    check_against(reference, awaited)
    check_against(reference, overlapped)


def observe_divergence(folder: Path) -> tuple[tuple[str, str], float]:
    """(how a rollout ends in which the second rank of an engine samples a wrong token, its seconds)."""
    play = start(folder, 2)
    if dist.get_rank() == 1:
        sample_wrongly_in_step(9)
    started = time.monotonic()
    return refused(play), time.monotonic() - started


def test_ranks_of_an_engine_that_sample_different_tokens_fail_together_within_8_steps(
    tiny_folder: Path,
) -> None:
    first, second = run_ranks(observe_divergence, 2, tiny_folder, timeout=120)
    (said, place), seconds = first
    assert second[0] == first[0], "so that both build a new engine, or end"
    differ = "tensor-parallel ranks [1] of replica 0 differ in step 16"
    assert place == f"rank 0: {differ}; rank 1: {differ}"
    assert f"the ranks of an engine sampled different tokens: {differ} or before, from rank 0; if" in said
    assert said.startswith("EngineFailure: rollout failed on rank 0: ")
    assert seconds < 30


def test_dividing_tasks_among_replicas_changes_nothing_and_a_failure_ends_all_replicas(
    tiny_folder: Path, seen: dict[str, Any]
) -> None:
    ranks = run_ranks(observe_replicas, 2, tiny_folder, timeout=240)
    (first, misuse, broken), (second, misuse_too, broken_too) = ranks
    together = [[turn.token_ids for turn in t.turns] for t in first + second]
    assert together == [[turn.token_ids for turn in t.turns] for t in seen["first"]]
    assert misuse == misuse_too and misuse.startswith("ConfigError: Game.step(): cannot be awaited; ")
    assert broken == broken_too, "one engine's failure is an EngineFailure on every rank"
    assert broken[0].startswith("EngineFailure: rollout failed on rank 1: ")
    assert broken[1].startswith("rank 1: MemoryError at ")


def observe_meeting(failed: int) -> tuple[str, str, float]:
    """(how a meeting of two ends, how one ends to which only the failed rank comes, its seconds)."""
    failure, ends = MemoryError("no block is free"), []
    mine = dist.get_rank() == failed
    for comes in (True, False):
        started = time.monotonic()
        try:
            if mine or comes:
                meet(failure if mine else None, dist.group.WORLD, 1.0)
            else:
                time.sleep(3)  # in a collective of vLLM
            ends.append("met")
        except RolloutError as error:
            ends.append(str(error))
    return ends[0], ends[1], time.monotonic() - started


@pytest.mark.parametrize("failed", [0, 1])
def test_a_rank_that_failed_alone_does_not_wait_for_the_deadline(failed: int) -> None:
    ranks = run_ranks(observe_meeting, 2, failed)
    assert [together for together, _, _ in ranks] == ["met", "met"], "then both raise together"
    _, alone, seconds = ranks[failed]
    assert alone == (
        f"the rollout failed on rank {failed}, and the other ranks of its engine did not end theirs within "
        "1 s: MemoryError: no block is free"
    )
    assert 1 <= seconds < 3


def test_request_seed_is_stable_and_depends_on_all_its_parts() -> None:
    assert request_seed(1, 2, 3) == request_seed(1, 2, 3) < 2**63
    assert (
        len({request_seed(1, 2, 3), request_seed(2, 2, 3), request_seed(1, 23, 3), request_seed(1, 2, 33)})
        == 4
    )
    assert request_seed(1, 12, 3) != request_seed(11, 2, 3)
