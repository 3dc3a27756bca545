"""The values that an environment may return, and the errors for other values."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest
import torch

from megatron_stppo.base.types import Message, Task
from megatron_stppo.environments import contract
from megatron_stppo.environments.base import StepResult
from megatron_stppo.parallel import collectives

TASK = Task("test", (Message("user", "Say e."),), ("e",), "train", 0)
RIGHT = StepResult("", 1.0, True, True, False, "ok", "e")


class Player:
    stop_strings: Any = ("e",)

    def __init__(self, messages: Any = TASK.prompt, result: Any = RIGHT) -> None:
        self._messages, self._result = messages, result

    async def reset(self, task: Task, seed: int) -> Any:
        return self._messages

    async def step(self, action: str) -> Any:
        return self._result

    async def close(self) -> None: ...


def said(call: Any, kind: type[Exception] = contract.WrongValue) -> str:
    with pytest.raises(kind) as raised:
        asyncio.run(call)
    assert len(str(raised.value).splitlines()) == 1
    return str(raised.value)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "returned None; return an environments.base.StepResult"),
        (("", 1.0, True), "returned ('', 1.0, True); return an environments.base.StepResult"),
        (
            StepResult("", 1.0, True, True, False, "won"),
            "outcome 'won'; choose from ok, wrong, truncated, error",
        ),  # type: ignore[arg-type]
        (StepResult("", 1.0, True, True, False), "returned done=True with outcome None; choose from ok"),
        (
            StepResult("", 0.0, False, True, False, "ok"),
            "done=False with outcome 'ok'; set it when done only",
        ),
        (StepResult("", "1", True, True, False, "ok"), "returned reward '1'; return a number"),  # type: ignore[arg-type]
        (StepResult("", None, True, True, False, "ok"), "returned reward None; return a number"),  # type: ignore[arg-type]
        (StepResult("", 1.0, 1, True, False, "ok"), "returned done 1; return True or False"),  # type: ignore[arg-type]
        (StepResult("", 1.0, True, None, False, "ok"), "returned valid None; return True or False"),  # type: ignore[arg-type]
        (StepResult("", 1.0, False, True, "1"), "returned tool_calls '1'; return a whole number"),  # type: ignore[arg-type]
        (StepResult("", 1.0, False, True, -1), "returned tool_calls -1; return a whole number"),
        (StepResult("", 1.0, False, True, 10**30), "return a whole number from 0 to 1000000"),
        (StepResult(None, 0.0, False, True, False), "returned observation None; return a string"),  # type: ignore[arg-type]
        (StepResult(b"x", 0.0, False, True, False), "returned observation b'x'; return a string"),  # type: ignore[arg-type]
        (StepResult("a\ud800", 0.0, False, True, False), "with '\\ud800'; remove unpaired surrogates"),
        (StepResult("", 1.0, True, True, False, "ok", None), "returned detail None; return a string"),  # type: ignore[arg-type]
        (
            StepResult("", 0.0, False, True, metrics=[1]),
            "returned metrics [1]; give at most 32 numbers by name",
        ),  # type: ignore[arg-type]
        (
            StepResult("", 0.0, False, True, metrics={f"m{i}": 0.0 for i in range(33)}),
            "; give at most 32 numbers by name",
        ),
        (
            StepResult("", math.nan, True, True, 0, "ok"),
            "reward nan; return a finite number from -1e+09 to 1e+09",
        ),
        (
            StepResult("", 1e10, True, True, 0, "ok"),
            "reward 10000000000.0; return a finite number from -1e+09",
        ),
        (StepResult("", 10**400, True, True, 0, "ok"), "; return a finite number from -1e+09 to 1e+09"),
        (StepResult("", 0.0, False, True, request=5), "returned request 5; do not set it"),  # type: ignore[arg-type]
    ],
)
def test_a_result_of_a_wrong_type_gives_one_line_with_the_remedy(result: Any, message: str) -> None:
    text = said(contract.step(Player(result=result), "e"))
    assert text.startswith("Player.step(): returned ") and message in text


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (None, "Player.reset(): returned None; return a list of at least one types.Message"),
        ([], "Player.reset(): returned []; return a list"),
        ("hello", "Player.reset(): returned 'hello'; return a list"),
        ([{"role": "user", "content": "hi"}], "Player.reset()[0]: returned {'role': 'user'"),
        ([Message("user", "a"), Message("user", None)], "Player.reset()[1]: returned content None"),  # type: ignore[arg-type]
        ([Message("user", "\udc00")], "returned content with '\\udc00'; remove unpaired surrogates"),
        ([Message("tool", "a", {"score": float("nan")})], "Player.reset()[0]: extra.score=nan is missing or"),
    ],
)
def test_messages_of_a_wrong_type_give_one_line_with_the_remedy(messages: Any, message: str) -> None:
    assert message in said(contract.reset(Player(messages), TASK, 0))


@pytest.mark.parametrize("stop", ["</answer>", None, 5, ("a", ""), (5,)])
def test_stop_strings_must_be_a_tuple_of_strings(stop: Any) -> None:
    player = Player()
    player.stop_strings = stop
    with pytest.raises(contract.WrongValue, match=r"^Player: stop_strings"):
        contract.stop_strings(player)


def test_a_method_that_is_missing_or_not_async_is_named() -> None:
    class Plain(Player):
        def step(self, action: str) -> StepResult:  # type: ignore[override]
            return RIGHT

        reset = None  # type: ignore[assignment]

    kind = contract.NotAnEnvironment
    assert (
        said(contract.step(Plain(), "e"), kind) == "Plain.step(): cannot be awaited; write `async def step`"
    )
    assert said(contract.reset(Plain(), TASK, 0), kind) == "Plain.reset: is missing; write `async def reset`"


def test_numbers_of_numpy_and_torch_become_python_numbers() -> None:
    given = StepResult("", np.float32(0.5), np.bool_(True), np.bool_(True), False, "ok")  # type: ignore[arg-type]
    taken = asyncio.run(contract.step(Player(result=given), "e"))
    assert taken == StepResult("", 0.5, True, True, False, "ok")
    assert (type(taken.reward), type(taken.done), type(taken.tool_calls)) == (float, bool, int)
    for reward in (torch.tensor(0.5), True, 2):
        given = StepResult("", reward, True, True, False, "ok")  # type: ignore[arg-type]
        assert asyncio.run(contract.step(Player(result=given), "e")).reward == float(reward)


def test_metrics_become_python_numbers() -> None:
    given = StepResult("", 0.0, False, True, metrics={"tests/passed": np.int64(3), "late": True})  # type: ignore[dict-item]
    taken = asyncio.run(contract.step(Player(result=given), "e"))
    assert repr(taken.metrics) == "{'tests/passed': 3.0, 'late': 1.0}"


@pytest.mark.parametrize("value", [math.nan, -math.inf, 10**400, "1", None, [1]])
def test_a_metric_that_is_not_a_finite_number_is_left_out(value: Any) -> None:
    given = StepResult("", 0.0, False, True, metrics={"a": value, "b": 1})
    assert asyncio.run(contract.step(Player(result=given), "e")).metrics == {"a": None, "b": 1.0}


def test_a_metric_with_another_name_is_left_out_under_a_name_that_can_be_shown() -> None:
    given: Any = {"search calls": 1, "caf\udce9": 2.0, 5: 3.0, "": 4.0, "x" * 65: 5.0}
    found = contract.metrics("here", given)
    assert found == {"search_calls": None, "caf_": None, "5": None, "_": None, "x" * 64: None}
    assert contract.metrics("here", {"a_b": 1, "a b": 2}) == {"a_b": 1.0}, "the right one of two stays"


def test_texts_of_numpy_become_those_of_python_which_ranks_can_exchange() -> None:
    given = StepResult(np.str_("a"), 0.0, True, True, 0, np.str_("ok"), np.str_("b"))  # type: ignore[arg-type]
    taken = asyncio.run(contract.step(Player(result=given), "e"))
    assert [type(text) for text in (taken.observation, taken.outcome, taken.detail)] == [str] * 3
    assert collectives.decode(collectives.encode(taken), StepResult) == taken
    (message,) = asyncio.run(contract.reset(Player([Message("user", np.str_("a"))]), TASK, 0))  # type: ignore[arg-type, misc]
    assert type(message.content) is str


def test_a_bool_of_tool_calls_becomes_a_number() -> None:
    taken = asyncio.run(contract.step(Player(result=StepResult("", 0.0, False, True, True)), "e"))
    assert (taken.tool_calls, type(taken.tool_calls)) == (1, int)


def test_ranks_can_exchange_results() -> None:
    given = StepResult("", 0.0, done=False, valid=True, tool_calls=1, metrics={"score": 0.5})
    assert collectives.decode(collectives.encode(given), StepResult) == given
