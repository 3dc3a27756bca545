"""Agents with the real engine: OpenAI's SDK, commands, failures; every token is the one that was sampled."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import torch
from openai import AsyncOpenAI, BadRequestError

from megatron_stppo.agents.endpoint.agents import open_agent, result_of
from megatron_stppo.agents.endpoint.environment import AgentEnvironment
from megatron_stppo.base.types import Message, Task, Trajectory
from megatron_stppo.config import EnvironmentConfig
from megatron_stppo.data.packing import to_batch
from megatron_stppo.environments.base import (
    MALFORMED_CALLS,
    REPEATED,
    AgentEpisode,
    Completion,
    Request,
    StepResult,
    ToolAway,
)
from megatron_stppo.environments.contract import WrongValue
from megatron_stppo.rollout.episodes.environment_host import EnvironmentHost
from tests.agents.endpoint.claims_requests import TOOL
from tests.agents.endpoint.world import World
from tests.rollout.vllm.tiny import reference_logprobs, task

EXAMPLES = Path(__file__).parents[3] / "examples" / "agents"


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def client(episode: AgentEpisode) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key)


async def say(sdk: Any, messages: list[Any], **given: Any) -> str:
    """Send the messages, append the answer to them and return it."""
    answer = await sdk.chat.completions.create(model="gpt-4o", messages=messages, temperature=0.1, **given)
    messages.append(answer.choices[0].message.model_dump())
    return answer.choices[0].message.content or ""


async def three_turns(episode: AgentEpisode) -> dict[str, Any]:
    async with client(episode) as sdk:
        messages: list[Any] = [user("a")]
        said = [await say(sdk, messages, stop=["e"])]
        for text in "bc":
            messages.append(user(text))
            said.append(await say(sdk, messages))
    return {"reward": 0.5, "detail": "three turns", "letters": sum(map(len, said))}


def check_log_probs(world: World, played: list[Trajectory]) -> None:
    """Check that the engine has read, at every turn, the tokens that the trajectory has before it."""
    for history in (h for t in played for h in t.histories()):
        expected = reference_logprobs(world.reference, history.token_ids)
        expected = expected[to_batch([history]).action_index_T - 1]
        given = torch.tensor([x for turn in history.turns for x in turn.rollout_logprob], dtype=torch.float64)
        assert float((given - expected).abs().mean()) < 1e-6


def test_an_agent_of_the_openai_sdk_is_one_history_token_for_token(world: World) -> None:
    world.tasks = [task(index) for index in range(4)]
    played = world.play(three_turns)
    for one in played:
        assert (one.outcome, one.detail, one.reward, one.branches) == ("wrong", "three turns", 0.5, ())
        assert [turn.reward for turn in one.turns] == [0.0, 0.0, 0.5]
        text = world.rules.tokenizer.decode(one.token_ids)
        opening = "<|im_end|>\n<|im_start|>assistant\n"
        assert text.startswith(f"<|im_start|>user\na{opening}") and f"\n<|im_start|>user\nb{opening}" in text
    assert len({one.token_ids for one in played}) == 4, "every episode has its own seeds"
    check_log_probs(world, played)
    again = world.play(three_turns)
    assert [t.token_ids for t in again] == [t.token_ids for t in played], "the run's seeds, not the client's"


def test_tokens_and_log_probs_are_those_of_an_environment_without_the_endpoint(world: World) -> None:
    class Once:
        stop_strings: tuple[str, ...] = ()

        async def reset(self, task: Task, seed: int) -> list[Message]:
            return [Message("user", "a")]

        async def step(self, action: str) -> StepResult:
            return StepResult("", 1.0, True, True, outcome="ok")

        async def close(self) -> None: ...

    async def once(episode: AgentEpisode) -> float:
        async with client(episode) as sdk:
            await say(sdk, [user("a")])
        return 1.0

    (built_in,), (agents,) = world.collect(Once), world.play(once)
    assert agents == replace(built_in, tool_calls=agents.tool_calls, metrics=agents.metrics)


def test_a_stream_has_the_same_completion(world: World) -> None:
    found = {}

    async def streamed(episode: AgentEpisode) -> float:
        async with client(episode) as sdk:
            chunks = [
                chunk
                async for chunk in await sdk.chat.completions.create(
                    model="m", messages=[user("a")], stream=True, stream_options={"include_usage": True}
                )
            ]
        found["text"] = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        found["usage"] = chunks[-1].usage.completion_tokens
        found["finish"] = [c.choices[0].finish_reason for c in chunks if c.choices][-1]
        return 1.0

    async def whole(episode: AgentEpisode) -> float:
        async with client(episode) as sdk:
            answer = await sdk.chat.completions.create(
                model="m", messages=[user("a")], logprobs=True, extra_body={"return_token_ids": True}
            )
            (choice,) = answer.choices
            found["ids"], found["logprobs"] = choice.token_ids, [x.logprob for x in choice.logprobs.content]
            assert [model.id async for model in sdk.models.list()] == ["tiny"]
        assert choice.message.content == found["text"] and choice.finish_reason == found["finish"]
        return 1.0

    (a,), (b,) = world.play(streamed), world.play(whole)
    assert a.token_ids == b.token_ids and found["usage"] == len(a.turns[0].token_ids)
    assert (tuple(found["ids"]), tuple(found["logprobs"])) == (
        b.turns[0].token_ids,
        b.turns[0].rollout_logprob,
    )


def test_two_conversations_at_the_same_time_are_two_histories_with_the_same_reward(world: World) -> None:
    async def conversation(sdk: Any, name: str) -> None:
        messages: list[Any] = [user(name)]
        await say(sdk, messages)
        messages.append(user("more"))
        await say(sdk, messages)

    async def both(episode: AgentEpisode) -> float:
        async with client(episode) as sdk:
            await asyncio.gather(conversation(sdk, "one"), conversation(sdk, "two"))
        return 1.0

    (played,) = world.play(both)
    assert [len(history.turns) for history in played.histories()] == [2, 2]
    assert [history.reward for history in played.histories()] == [1.0, 1.0]
    check_log_probs(world, [played])


def leave(world: World, episode: AgentEpisode, seconds: float = 0.0) -> None:
    """Ask for a completion, and close the connection after some seconds without reading."""
    body = json.dumps({"messages": [user("a")]})
    path = f"{httpx.URL(episode.base_url).path}/chat/completions"
    lines = [f"POST {path} HTTP/1.1", "host: x", f"authorization: Bearer {episode.api_key}"]
    with socket.create_connection(("127.0.0.1", world.endpoint.port)) as connection:
        connection.sendall("\r\n".join([*lines, f"content-length: {len(body)}", "", body]).encode())
        time.sleep(seconds)


def test_a_client_that_disconnects_gets_its_completion_when_it_asks_again(world: World) -> None:
    async def leaves(episode: AgentEpisode) -> float:
        await asyncio.to_thread(leave, world, episode, 0.1)
        content, headers = {"messages": [user("a")]}, {"authorization": f"Bearer {episode.api_key}"}
        async with httpx.AsyncClient(base_url=episode.base_url, headers=headers) as http:
            await asyncio.sleep(0.2)
            answer = (await http.post("/chat/completions", json=content)).json()
            again = await http.post(
                "/chat/completions", json=content, headers={"x-stainless-retry-count": "1"}
            )
        assert again.json()["choices"] == answer["choices"]
        return 1.0

    (played,) = world.play(leaves)
    assert (played.outcome, played.detail) == ("ok", "")
    assert played.metrics[MALFORMED_CALLS] == 0
    assert played.metrics[REPEATED] in (1.0, 2.0), "1 where the first request was left before it was taken"
    assert (len(played.turns), played.branches) == (1, ())


def test_failures_of_an_agent_are_outcomes_of_its_episode(world: World) -> None:
    async def troubled(episode: AgentEpisode) -> float:
        kind = episode.task.extra["behave"]
        if kind == "never calls":
            return 1.0
        if kind == "raises at once":
            raise KeyError("no tool")
        if kind == "hangs at once":
            await asyncio.sleep(60)
        if kind == "gives up":
            leave(world, episode)
            (session,) = (s for s in world.endpoint.sessions.values() if s.token == episode.api_key)
            while not session.asked:  # the loop of the episodes is busy, so the request is not taken
                time.sleep(0.01)
            time.sleep(0.2)
            return 0.0
        if kind == "asks too much":
            async with client(episode) as sdk:
                with suppress(BadRequestError):
                    await say(sdk, [user("b" * 999)])
            return 0.0
        if kind == "is refused":
            async with client(episode) as sdk:
                with suppress(BadRequestError):
                    await say(sdk, [user("a")], n=2)
            return 0.0
        async with client(episode) as sdk:
            messages: list[Any] = [user("a")]
            await say(sdk, messages)
            if kind == "raises":
                raise RuntimeError("the tool broke")
            if kind == "hangs":
                await asyncio.sleep(60)
            if kind == "tool away":
                raise ToolAway("sandbox: refused")
            if kind == "cancelled":
                raise asyncio.CancelledError
            if kind == "exits":
                raise SystemExit(3)
            if kind == "is interrupted":
                raise KeyboardInterrupt
            if kind == "too many":
                for _ in range(9):
                    await say(sdk, [user("b")])
            if kind == "too long":
                await say(sdk, [user("b" * 999)])
        return 0.0

    refused = "NoCompletion: the agent has ended without a completion; its request:"
    kinds = {
        "plays": ("wrong", ""),
        "never calls": ("error", "NoCompletion: the agent has ended without asking for a completion"),
        "raises at once": ("error", "KeyError: 'no tool'"),
        "hangs at once": ("timeout", "no answer within 4 s"),
        "raises": ("error", "RuntimeError: the tool broke"),
        "hangs": ("timeout", "no answer within 4 s"),
        "tool away": ("error", "tool away: sandbox: refused"),
        "cancelled": ("error", "CancelledError: "),
        "exits": ("error", "RuntimeError: the agent raised SystemExit(3)"),
        "is interrupted": ("error", "RuntimeError: the agent raised KeyboardInterrupt()"),
        "gives up": ("timeout", "the agent has closed its request before the completion was ready"),
        "asks too much": (
            "error",
            "NoCompletion: the agent has ended without a completion; its request: the ",
        ),
        "is refused": ("error", f"{refused} 'n'"),
        "too many": ("truncated", "the episode has had environment.max_turns=6 completions"),
        "too long": ("truncated", "the prompt has "),
    }
    world.tasks = [task(number, kind) for number, kind in enumerate(kinds)]
    for played, (kind, (outcome, detail)) in zip(
        world.play(troubled, deadline=4.0), kinds.items(), strict=True
    ):
        assert played.outcome == outcome and played.detail.startswith(detail), (
            kind,
            played.outcome,
            played.detail,
        )
    assert not [name for name in world.endpoint.sessions], "every door is shut"


def test_requests_that_are_refused_are_logged_once_per_kind_with_the_reason(world: World) -> None:
    async def careless(episode: AgentEpisode) -> float:
        async with client(episode) as sdk:
            await say(sdk, [user("a")])
            for given in ({"n": 2}, {"n": 3}, {"echo": True}, {"stop": ["a"] * 17}, {"stop": ["a"] * 18}):
                with suppress(BadRequestError):
                    await say(sdk, [user("a")], extra_body=given)
            with suppress(BadRequestError):
                await say(sdk, [user("a" * 999)])
        return 1.0

    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("megatron_stppo.rollout.episodes.environment_host")
    logger.addHandler(handler)
    world.tasks = [task(number, "") for number in range(3)]
    played = world.play(careless)
    logger.removeHandler(handler)
    assert [one.outcome for one in played] == ["ok"] * 3
    said = [record.getMessage().split(": ", 2)[1:] for record in records]
    assert {first for first, _ in said} == {"a request of the agent is refused"}
    assert sorted(reason.split()[0] for _, reason in said) == ["'echo'", "'n'", "stop:", "the"]


def test_calls_of_tools_count_where_the_agent_fails_on_them(world: World) -> None:
    async def breaks(episode: AgentEpisode) -> float:
        async with client(episode) as sdk:
            await say(sdk, [user("a")], tools=[TOOL])
            if episode.task.extra["behave"] == "hangs":
                await asyncio.sleep(60)
            raise RuntimeError("the tool broke")

    def make() -> AgentEnvironment:
        return AgentEnvironment(breaks, world.endpoint, world.rules)

    written = '<tool_call>{"name": "search", "arguments": {"query": "x"}}</tool_call>'
    turn = Completion(written, (5, 6), (-0.5, -0.5), "end")
    with EnvironmentHost(make, concurrency=2, deadline=3.0) as host:
        for index, kind in enumerate(("raises", "hangs")):
            host.reset(index, task(index, kind), seed=0)
        assert all(answer.request for answer in host.take(2))
        for index in range(2):
            host.step(index, turn)
        found = [
            (answer.result.outcome, answer.result.tool_calls) for answer in host.take(2) if answer.result
        ]
    assert found == [("error", 1), ("timeout", 1)]


class Breaks:
    """A CompletionEnvironment that fails after two calls of tools."""

    tool_calls = 2

    async def reset(self, task: Task, seed: int) -> Request:
        return Request(0, (5, 6))

    async def complete(self, completion: Completion) -> StepResult:
        raise RuntimeError("the tool broke")

    async def close(self) -> None: ...


def test_the_calls_of_a_failed_completion_are_the_episodes(world: World) -> None:
    (played,) = world.collect(Breaks)
    assert (played.outcome, played.tool_calls) == ("error", 2)


def test_an_agent_whose_tools_are_away_at_the_start_is_started_again(world: World) -> None:
    starts = []

    async def waits(episode: AgentEpisode) -> float:
        starts.append(episode.base_url)
        if len(starts) == 1:
            raise ToolAway("sandbox: starts")
        return (await three_turns(episode))["reward"]

    (played,) = world.play(waits, tool_wait=5.0)
    assert played.outcome == "wrong" and len(set(starts)) == 2


def test_a_result_of_the_wrong_kind_is_an_error_of_its_episode_in_one_line(world: World) -> None:
    async def confused(episode: AgentEpisode) -> Any:
        await three_turns(episode)
        return "good"

    (played,) = world.play(confused)
    assert played.outcome == "error" and len(played.turns) == 3
    assert played.detail == "WrongValue: the agent: returned reward 'good'; return a number"
    assert result_of({"reward": 1.0, "moves": float("nan"), "n": 2}).metrics == {"moves": None, "n": 2.0}
    assert (
        result_of(0.5).outcome == "wrong" and result_of({"reward": 1, "outcome": "wrong"}).outcome == "wrong"
    )
    for wrong in (None, {"reward": "1"}, {"reward": 1.0, "outcome": "good"}, {"reward": float("nan")}):
        try:
            result_of(wrong)
        except WrongValue as error:
            assert "\n" not in str(error)
        else:
            raise AssertionError(wrong)


def test_the_examples_play(world: World) -> None:
    sys.path.insert(0, str(EXAMPLES))
    os.environ["PYTHONPATH"] = str(EXAMPLES)
    agent = open_agent(EnvironmentConfig(kind="agent", agent="openai_sdk:agent"))
    (played,) = world.play(agent)
    assert (played.outcome, len(played.turns)) == ("wrong", 1), played.detail
    prompt = world.rules.tokenizer.decode(played.prompt_ids)
    assert prompt.startswith("<|im_start|>user\nQuestion 0: which city")
