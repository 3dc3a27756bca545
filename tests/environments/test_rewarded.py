"""`environment.reward`: a function in place of the environment's reward."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_stppo.base.types import Message, Task
from megatron_stppo.config import ConfigError, EnvironmentConfig
from megatron_stppo.environments import choose, contract
from megatron_stppo.environments.base import StepResult, ToolAway
from megatron_stppo.rollout.episodes.check_environment import check

TASK = Task("test", (Message("user", "Say e."),), ("e",), "train", 0)
# An environment of two turns that is right if the second one is "e". It gives 0.25 for the first turn.
TWO = """
import asyncio
from megatron_stppo.environments.base import Request, StepResult, ToolAway

class Two:
    stop_strings = ()

    async def reset(self, task, seed):
        self.turns = 0
        return list(task.prompt)

    async def step(self, action):
        self.turns += 1
        if self.turns == 1:
            return StepResult("again", 0.25, False, True, metrics={"a": 1})
        if action == "fail":
            return StepResult("", 0.0, True, True, outcome="error")
        right = action == "e"
        return StepResult("", float(right), True, True, outcome="ok" if right else "wrong", metrics={"a": 2})

    async def close(self): ...

def factory(section):
    return Two

class Agent:
    async def reset(self, task, seed):
        return Request(0, (1, 2))

    async def complete(self, completion): ...
    async def close(self): ...

def agent(section):
    return Agent

def length(task, turns, result):
    return result.reward - 0.01 * sum(len(action) for action, _ in turns)

async def slow(task, turns, result):
    await asyncio.sleep(0)
    return {"reward": 2, "seen": len(turns), "a": turns[0][1] == "again"}

calls = []

def away(task, turns, result):
    calls.append(turns)
    if len(calls) == 1:
        raise ToolAway("judge: connection refused")
    return 0.5

def two_arguments(task, turns): ...
def nan(task, turns, result): return float("nan")
def text(task, turns, result): return "1"
def unnamed(task, turns, result): return {"score": 1.0}
number = 3
"""


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "two.py").write_text(TWO)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("two", None)


def section(reward: str) -> EnvironmentConfig:
    return EnvironmentConfig(kind="two", reward=reward)


def play(reward: str, *actions: str) -> list[StepResult]:
    async def episode() -> list[StepResult]:
        environment = choose.factory(section(reward))()
        assert await contract.reset(environment, TASK, 0) == TASK.prompt
        results = [await contract.step(environment, action) for action in actions]
        await contract.close(environment)
        return results

    return asyncio.run(episode())


def test_the_functions_value_is_the_reward_of_the_whole_episode() -> None:
    first, last = play("two:length", "abc", "e")
    assert first.reward == 0.0  # not the environment's 0.25
    assert last.reward == 1 - 0.01 * 4  # "abc" and "e" have 4 characters
    assert (last.outcome, last.metrics) == ("ok", {"a": 2.0})


def test_a_coroutine_function_may_return_metrics_too() -> None:
    last = play("two:slow", "abc", "x")[-1]
    assert (last.reward, last.outcome) == (2.0, "wrong")  # outcomes stay the environment's
    assert last.metrics == {"a": 1.0, "seen": 2.0}


def test_an_episode_that_failed_has_no_reward() -> None:
    last = play("two:nan", "abc", "fail")[-1]
    assert (last.outcome, last.reward) == ("error", 0.0)


def test_after_tool_away_the_function_is_called_again_and_the_environment_is_not() -> None:
    async def episode() -> StepResult:
        environment = choose.factory(section("two:away"))()
        await environment.reset(TASK, 0)
        await environment.step("abc")
        with pytest.raises(ToolAway):
            await environment.step("e")
        return await environment.step("e")

    assert asyncio.run(episode()) == StepResult("", 0.5, True, True, outcome="ok", metrics={"a": 2.0})


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("tow:length", "no allowed folder has this module; give MODULE:FUNCTION, in the folder of"),
        ("two:lenght", "AttributeError: module 'two' has no attribute 'lenght'; give MODULE:FUNCTION"),
        ("two:number", "is not a function; write `def reward(task, turns, result) -> float`"),
        (
            "two:two_arguments",
            "cannot be called with (task, turns, result): too many positional arguments; w",
        ),
        ("os:getcwd", "no allowed folder has this module"),
    ],
)
def test_a_function_that_cannot_be_used_gives_one_line_at_start_up(reward: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        choose.factory(section(reward))
    assert str(raised.value).startswith(f"environment.reward={reward}: {message}")
    assert "\n" not in str(raised.value)


def test_a_missing_module_is_found_before_torch_is_imported() -> None:
    with pytest.raises(ConfigError, match=r"^environment.reward=tow: no allowed folder has this module"):
        choose.check(section("tow"))


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("two:nan", "returned nan; return a finite number from -1e+09 to 1e+09"),
        ("two:text", "returned '1'; return a number"),
        ("two:unnamed", "returned {'score': 1.0}; return a number, or a mapping with \"reward\""),
    ],
)
def test_a_value_that_is_no_reward_is_an_error_of_its_episode_in_one_line(reward: str, message: str) -> None:
    with pytest.raises(contract.WrongValue) as raised:
        play(reward, "abc", "e")
    assert str(raised.value) == f"environment.reward={reward}: {message}"


def test_an_agent_returns_its_reward_itself() -> None:
    environment = choose.factory(EnvironmentConfig(kind="two:agent", reward="two:length"))()
    with pytest.raises(
        ConfigError, match=r"^environment.reward=two:length: an agent returns the reward itse"
    ):
        asyncio.run(contract.reset(environment, TASK, 0))


def test_check_environment_finds_it_without_a_model() -> None:
    problems: list[Any] = check(section("two:nan"), [TASK], ["e"]).problems
    said = "environment.reward=two:nan: returned nan; return a finite number from -1e+09 to 1e+09"
    assert problems == [said]
