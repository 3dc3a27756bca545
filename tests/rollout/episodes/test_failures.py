from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_stppo.base.errors import TooManyFailures
from megatron_stppo.base.types import Outcome, Summary, TurnSummary
from megatron_stppo.commands.train import noting_the_end
from megatron_stppo.config import Config
from megatron_stppo.environments.base import MALFORMED_CALLS
from megatron_stppo.observe.describe import describe_rollouts
from megatron_stppo.rollout.episodes.failures import KINDS, FailureLimit, FailureLines, report, warn

TURNS = (TurnSummary(1, 0, 0.0, ((0, 1),)),)


def episode(
    index: int, outcome: Outcome, tool_calls: int = 0, detail: str = "", overlong: int = 0
) -> Summary:
    return Summary(index, 1, (), outcome, 0, tool_calls, 0, detail, overlong)


def rollout(silent: int, failed: int, answered: int = 0) -> list[Summary]:
    """Return episodes without a search, with a failed search, and with a successful one."""
    return (
        [episode(n, "wrong") for n in range(silent)]
        + [episode(n, "error", 1, "retrieval: status 401") for n in range(failed)]
        + [episode(n, "ok", 1) for n in range(answered)]
    )


def test_more_failures_than_the_rate_among_all_episodes_end_the_run() -> None:
    limit = FailureLimit(0.5)
    limit.check([episode(1, "timeout"), episode(2, "wrong")])
    with pytest.raises(TooManyFailures) as raised:
        limit.check(
            [episode(7, "timeout", 0, "no answer within 30 s"), episode(8, "error"), episode(9, "ok")]
        )
    assert str(raised.value) == (
        "2 of 3 episodes failed (67%), more than environment.max_failure_rate=0.5 allows; the first: task 7: "
        "timeout: no answer within 30 s"
    )


def test_a_tool_that_always_fails_ends_the_run_although_few_episodes_call_it() -> None:
    """7 of 64 episodes fail: 11 %, below 20 %. After the third rollout 21 of 21 that called a tool failed."""
    limit = FailureLimit(0.2)
    limit.check(rollout(57, 7))
    limit.check(rollout(57, 7))
    with pytest.raises(
        TooManyFailures, match=r"21 of 21 episodes that called a tool failed \(100%\), more than"
    ):
        limit.check(rollout(57, 7))


def test_one_failure_among_few_tool_calls_does_not_end_the_run_and_old_failures_expire() -> None:
    limit = FailureLimit(0.2)
    for _ in range(10):
        limit.check(
            rollout(60, 1, 3)
        )  # 25 %: of 4 it may be chance; of 20 it is 5 failures, more than allowed
        limit.check(rollout(60, 0, 16))  # 1 of 20 together


def test_a_prompt_that_is_too_long_is_no_failure_unless_no_episode_was_played() -> None:
    long = episode(30, "error", 0, "prompt of 148 tokens exceeds rollout.max_prompt_tokens=60", 148)
    FailureLimit(0.0).check([long, long, episode(1, "wrong")])
    with pytest.raises(TooManyFailures, match=r"^1 of 2 episodes failed \(50%\)"):
        FailureLimit(0.4).check([long, *rollout(1, 1)])
    with pytest.raises(TooManyFailures, match=r"^all 2 prompts are too long; the first: task 30: error: "):
        FailureLimit(1.0).check([long, long])


def test_failed_episodes_give_one_line_with_count_kinds_and_first_reason() -> None:
    played = [*rollout(5, 2, 1), episode(30, "timeout", 0, "no answer within 30 s")]
    assert report(played) == [
        "3 of 9 episodes failed (2 error, 1 timeout), 2 of the 3 that called a tool; the first: task 0: "
        "error: retrieval: status 401"
    ]


def test_a_prompt_that_is_too_long_is_counted_apart_from_the_outcomes() -> None:
    row = describe_rollouts([episode(1, "error", overlong=500), episode(2, "error")], 0)
    assert (row["outcome/error"], row["rollout/overlong_prompts"]) == (1, 1)


def test_a_rollout_logs_a_limited_number_of_kinds_of_failure(caplog: pytest.LogCaptureFixture) -> None:
    lines = FailureLines(logging.getLogger(__name__))
    for number in range(KINDS + 3):
        lines.log(f"episode {number}", type(f"Kind{number}", (Exception,), {})(), "it failed")
    assert [record.getMessage() for record in caplog.records] == [
        f"episode {number}: it failed" for number in range(KINDS)
    ]


def test_overlong_prompts_are_named_by_task_and_length() -> None:
    detail = "prompt of 148 tokens exceeds rollout.max_prompt_tokens=60"
    twice = [episode(4, "error", 0, detail, 148)] * 2
    assert report([*twice, episode(1, "ok")]) == [
        f"2 of 3 prompts were too long and are not played: task 4: {detail}"
    ]
    many = [episode(n, "error", 0, f"prompt {n}", 148) for n in range(5)]
    assert report(many)[0].endswith("task 0: prompt 0; task 1: prompt 1; task 2: prompt 2; ...")


def test_metrics_that_are_left_out_and_calls_that_cannot_be_read_are_counted_in_one_line_each() -> None:
    played = [episode(0, "ok"), episode(1, "ok"), episode(2, "wrong")]
    played[0].metrics.update({"moves": None, "score": 1.0, MALFORMED_CALLS: 2.0})
    played[1].metrics.update({"moves": None, "a": None, MALFORMED_CALLS: 0.0})
    assert report(played) == [
        "metrics that are left out: 3 (a, moves); give finite numbers, with names of 1 to 64 letters, digits "
        "and _ . / -",
        "2 completions of 1 of 3 episodes have calls of tools that environment.tool_parser cannot read; the "
        "agent gets them as text",
    ]
    described = describe_rollouts([replace(t, turns=TURNS) for t in played], 0)
    assert described["rollout/unusable_metrics"] == 3
    assert {name: value for name, value in described.items() if name.startswith("environment/")} == {
        "environment/score": 1.0,
        "environment/endpoint/malformed_calls": 1.0,
    }


def test_a_rollout_without_failures_prints_nothing_and_only_the_first_rank_warns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        warn("iteration 1", rollout(3, 0, 3), rank=0)
        warn("iteration 2", rollout(3, 1), rank=1)
        warn("iteration 3", rollout(3, 1), rank=0)
    (record,) = caplog.records
    assert record.getMessage().startswith("iteration 3: 1 of 4 episodes failed (1 error)")


def test_too_many_failures_write_their_reason_to_exit_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    config = Config.model_validate({"model": {"path": "m"}, "run": {"root": tmp_path}})
    os.makedirs(config.run.folder)
    with pytest.raises(TooManyFailures) as raised, noting_the_end(config):
        FailureLimit(0.2).check(rollout(0, 1))
    assert raised.value.exit_code == 1
    note = json.loads((config.run.folder / "exit.json").read_text())
    assert note == {"code": 1, "reason": str(raised.value)}
