"""OpenAI's Responses API: requests and replies worked out by hand, and OpenAI's SDK with the real engine."""

from __future__ import annotations

import json
from typing import Any

from openai import AsyncOpenAI, BadRequestError
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from vllm.tool_parsers import ToolParserManager

from megatron_stppo.agents.protocols.exchange import Ask
from megatron_stppo.agents.protocols.openai_chat import chat_ask
from megatron_stppo.agents.protocols.openai_responses import (
    ACCEPTED,
    IGNORED,
    responses_ask,
    responses_events,
    responses_object,
)
from megatron_stppo.environments.base import AgentEpisode
from tests.agents.endpoint.claims_agents import check_log_probs, client
from tests.agents.endpoint.claims_messages import events, reply
from tests.agents.endpoint.claims_recorder import answered, asked, recorder
from tests.agents.endpoint.claims_requests import VALUES, refusal
from tests.agents.endpoint.world import LIMITS, World
from tests.rollout.vllm.tiny import task

HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "name": "search", "parameters": {"type": "object"}, "strict": True}
CALL = {"type": "function_call", "call_id": "c1", "name": "search", "arguments": '{"q": "a"}', "id": "fc_1"}
FOUND = {"type": "function_call_output", "call_id": "c1", "output": "A"}
THOUGHT = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "hm"}],
}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def request(*items: dict[str, Any], **given: Any) -> Ask:
    return responses_ask({"model": "m", "input": list(items) or HI} | given, has_parser=True)


def said(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]}


def test_items_of_a_turn_become_one_message(world: World) -> None:
    one = request(
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Where?"}]},
        THOUGHT,
        said("I look."),
        CALL,
        CALL | {"call_id": "c2", "arguments": "{broken"},
        FOUND | {"call_id": "c2", "output": [{"type": "input_text", "text": "B"}]},
        FOUND,
        said("There."),
        {"role": "developer", "content": [{"type": "input_text", "text": f"Be {one}."} for one in "ab"]},
        instructions="You are an agent.",
        tools=[TOOL],
        tool_choice="auto",
        max_output_tokens=32,
        parallel_tool_calls=True,
        reasoning={"effort": "medium", "summary": "auto"},
        store=False,
        include=["reasoning.encrypted_content"],
        text={"format": {"type": "text"}, "verbosity": "low"},
    )
    assert [(m["role"], m["content"]) for m in one.messages] == [
        ("system", "You are an agent."),
        ("user", "Where?"),
        ("assistant", "I look."),
        ("tool", "B"),
        ("tool", "A"),
        ("assistant", "There."),
        ("system", "Be a.\n\nBe b."),
    ]
    assert one.messages[2]["reasoning_content"] == "hm"
    assert [c["function"]["arguments"] for c in one.messages[2]["tool_calls"]] == [{"q": "a"}, "{broken"]
    assert one.tools[0]["function"]["name"] == "search"
    assert (one.api, one.max_tokens, one.thinking, one.sealed) == ("responses", 32, True, True)


def test_a_text_is_a_message_of_the_user_and_the_chat_the_same_conversation(world: World) -> None:
    function = {"name": "search", "arguments": '{"q":"a"}'}
    calls = [{"id": "x", "type": "function", "function": function}]
    chat = [*HI, {"role": "assistant", "content": None, "tool_calls": calls}]
    chat.append({"role": "tool", "tool_call_id": "x", "content": "A"})
    same = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}
    one = request(*HI, CALL, FOUND, tools=[TOOL])
    two = chat_ask({"messages": chat, "tools": [same]}, has_parser=True)
    assert (one.units, one.kind) == (two.units, two.kind)
    assert responses_ask({"input": "hi"}, has_parser=True).units == request(*HI).units


def test_two_turns_of_the_assistant_are_two_messages(world: World) -> None:
    for items, roles in (
        ((*HI, said("a"), said("b")), ["user", "assistant", "assistant"]),
        ((*HI, CALL, THOUGHT, said("b"), FOUND), ["user", "assistant", "assistant", "tool"]),
        ((*HI, CALL, CALL, FOUND, FOUND), ["user", "assistant", "tool", "tool"]),
        ((*HI, THOUGHT, CALL, FOUND), ["user", "assistant", "tool"]),
        ((*HI, THOUGHT), ["user", "assistant"]),
    ):
        assert [message["role"] for message in request(*items).messages] == roles, items


def test_what_is_not_supported_is_refused_in_one_line(world: World) -> None:
    foreign = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}
    for given, expected in (
        ({"previous_response_id": "resp_1"}, "previous_response_id, conversation: nothing is stored"),
        ({"conversation": "conv_1"}, "previous_response_id, conversation: nothing is stored"),
        ({"background": True}, "'background' is not supported"),
        ({"truncation": "auto"}, "'truncation' is not supported"),
        ({"top_logprobs": 2}, "'top_logprobs' is not supported"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format: only text"),
        ({"include": ["web_search_call.results"]}, "include: only reasoning.encrypted_content"),
        ({"tool_choice": "required", "tools": [TOOL]}, "tool_choice: only auto and none"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]: the type 'web_search' is not supported"),
        ({"tools": [{"type": "namespace", "name": "a"}]}, "tools[0].tools: must be a list"),
        (
            {"tools": [{"type": "namespace", "tools": [TOOL]}]},
            "tools[0].tools[0]: needs a name and a namespace",
        ),
        ({"input": [CALL | {"namespace": 1}]}, "input[0]: needs a name and a namespace"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]: the type 'item_reference' is not"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]: the type",
        ),
        ({"input": [{"role": "king", "content": "a"}]}, "input[0].role: must be user"),
        ({"input": [foreign, said("a")]}, "input[0].encrypted_content: this endpoint has not sent it"),
        ({"input": []}, "input: must have at least one message"),
        ({"max_output_tokens": 0}, "max_output_tokens: must be at least 1"),
        ({"max_output_tokens": "5"}, "max_output_tokens: must be a number"),
        ({"temperature": "hot"}, "temperature: must be a number"),
        ({"input": [*HI, CALL]}, "input: a call of a tool has no result"),
        ({"input": [*HI, FOUND]}, "input: there is a result of a tool, but no call before it: 'c1'"),
    ):
        assert refusal(lambda g=given: request(**g)).startswith(f"400 {expected}"), given


def test_defaults_are_accepted(world: World) -> None:
    one = request(background=False, truncation="disabled", top_logprobs=0, tools=[], include=[], prompt=None)
    assert one.digest == request().digest != request({"role": "user", "content": "a"}).digest


def test_any_value_in_any_place_is_accepted_or_refused_in_one_line(world: World) -> None:
    for value in VALUES:
        for field in (*ACCEPTED, *IGNORED, "made_up", "previous_response_id", "background"):
            seen = refusal(lambda f=field, v=value: request(**{f: v}))
            assert seen == "not refused" or seen.startswith("400 "), (field, value, seen)
        for item in (CALL, FOUND, THOUGHT, said("a"), {"role": "user", "content": "a"}):
            for part in (*item, "encrypted_content", "namespace"):
                seen = refusal(lambda i=item, p=part, v=value: request(i | {p: v}, *HI))
                assert seen == "not refused" or seen.startswith("400 "), (item, part, value, seen)
        for part in TOOL:
            seen = refusal(lambda p=part, v=value: request(tools=[TOOL | {p: v}]))
            assert seen == "not refused" or seen.startswith("400 "), (part, value, seen)


def test_a_stream_adds_fills_and_ends_each_item(world: World) -> None:
    one = request(reasoning={"effort": "low"}, include=["reasoning.encrypted_content"])
    answer = reply("<think>hm</think>I look.", ("c1", "search", '{"q": "a"}'), finish="tool_calls")
    seen = events(responses_events(answer, "m", one))
    assert [event["type"].removeprefix("response.") for event in seen] == [
        "created",
        "in_progress",
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done"),
        "output_item.done",
        "completed",
    ]
    assert [event["sequence_number"] for event in seen] == list(range(len(seen)))
    for event in seen:
        EVENT.validate_python(event)
    assert seen[2]["item"]["content"] == [] and seen[14]["item"]["arguments"] == ""
    assert seen[10]["delta"] == "I look." and seen[15]["delta"] == '{"q": "a"}'
    assert {event["item_id"] for event in seen[3:7]} == {seen[2]["item"]["id"]}
    whole = Response.model_validate(seen[-1]["response"])
    assert whole.output_text == "I look." and whole.usage is not None and whole.usage.total_tokens == 10
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    assert seen[7]["item"]["encrypted_content"] == "megatron_stppo:hm"


def test_a_reply_that_is_cut_is_incomplete(world: World) -> None:
    whole = responses_object(reply("a", finish="length"), "m", request())
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    last = events(responses_events(reply("a", finish="length"), "m", request()))[-1]
    assert last["type"] == "response.incomplete" and last["response"]["output"][0]["status"] == "incomplete"


def test_items_that_are_sent_back_continue_the_history(world: World) -> None:
    """Codex sends back thinking without its content, as encrypted_content only."""
    for sealed in (False, True):
        one = recorder(world, parser=ToolParserManager.get_tool_parser("hermes"))
        given: dict[str, Any] = {"tools": [TOOL], "reasoning": {"effort": "low"}}
        given |= {"include": ["reasoning.encrypted_content"]} if sealed else {}
        first = request(**given)
        assert asked(one, first)[0] == 0
        written = '<think>hm</think>\n<tool_call>{"name": "search", "arguments": {"q": "a"}}</tool_call>'
        items = responses_object(answered(one, written), "m", first)["output"]
        assert [item["type"] for item in items] == ["reasoning", "function_call"]
        if sealed:
            del items[0]["content"]
        again = request(*HI, *items, FOUND | {"call_id": items[1]["call_id"]}, **given)
        assert asked(one, again) == (0, "\n<|im_start|>tool\nA<|im_end|>\n<|im_start|>assistant\n")


def test_functions_of_a_namespace_are_called_by_both_names(world: World) -> None:
    """Codex groups the tools of an MCP server."""
    space = {"type": "namespace", "name": "maps", "description": "Maps.", "tools": [TOOL]}
    one = recorder(world, parser=ToolParserManager.get_tool_parser("hermes"))
    first = request(tools=[space, TOOL])
    assert [tool["function"]["name"] for tool in first.tools] == ["maps__search", "search"]
    assert asked(one, first)[0] == 0
    form = '<tool_call>{{"name": "{}", "arguments": {{"q": "a"}}}}</tool_call>'
    written = "\n".join(map(form.format, ("maps__search", "search", "maps__other")))
    items = responses_object(answered(one, written), "m", first)["output"]
    assert [(item.get("namespace"), item["name"]) for item in items] == [
        ("maps", "search"),
        (None, "search"),
        (None, "maps__other"),
    ]
    found = [FOUND | {"call_id": item["call_id"]} for item in items]
    assert asked(one, request(*HI, *items, *found, tools=[space, TOOL]))[0] == 0


def test_openais_sdk_plays_one_history_token_for_token(world: World) -> None:
    found: dict[str, Any] = {}

    async def plays(episode: AgentEpisode) -> float:
        async with client(episode) as sdk:
            items: Any = [{"role": "user", "content": "a"}]
            for text in "bc":
                whole = await sdk.responses.create(model="m", input=items, instructions="i")
                items += [item.model_dump() for item in whole.output]
                items.append({"role": "user", "content": text})
            stream = await sdk.responses.create(model="m", input=items, instructions="i", stream=True)
            *_, last = [event async for event in stream]
            found["last"], found["usage"] = last.type, last.response.usage  # type: ignore[union-attr]
            await refused(sdk)
        return 1.0

    async def refused(sdk: AsyncOpenAI) -> None:
        try:
            await sdk.responses.create(model="m", input="a", previous_response_id="resp_1")
        except BadRequestError as error:
            found["error"] = error.message
            assert json.loads(error.response.text)["error"]["type"] == "invalid_request"

    (played,) = world.play(plays)
    assert (played.outcome, played.branches, len(played.turns)) == ("ok", (), 3), played.detail
    assert found["last"] in ("response.completed", "response.incomplete")
    assert found["usage"].output_tokens == len(played.turns[-1].token_ids)
    assert "send the whole `input`" in found["error"]
    check_log_probs(world, [played])


def test_an_agent_that_fails_on_an_incomplete_reply_is_truncated(world: World) -> None:
    async def fails(episode: AgentEpisode) -> float:
        async with client(episode) as sdk:
            if episode.task.extra["behave"] == "chat":
                await sdk.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}])
            else:
                await sdk.responses.create(model="m", input="a")
        raise RuntimeError("incomplete")

    world.tasks = [task(0, "responses"), task(1, "chat")]
    played = world.play(fails)
    assert all(len(one.turns[0].token_ids) == LIMITS.max_turn_tokens for one in played), "both are cut"
    assert [(one.outcome, one.detail) for one in played] == [
        ("truncated", "the last completion is incomplete"),
        ("error", "RuntimeError: incomplete"),
    ]
