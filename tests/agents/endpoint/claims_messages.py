"""Anthropic's Messages API: requests and replies as they are sent, worked out by hand."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from vllm.tool_parsers import ToolParserManager

from megatron_stppo.agents.protocols.anthropic_messages import (
    ACCEPTED,
    IGNORED,
    messages_ask,
    messages_error,
    messages_events,
    messages_object,
)
from megatron_stppo.agents.protocols.body import Refusal
from megatron_stppo.agents.protocols.exchange import Ask, Reply
from tests.agents.endpoint.claims_hostile import ask, head, send, serving
from tests.agents.endpoint.claims_recorder import answered, asked, recorder
from tests.agents.endpoint.claims_requests import VALUES, refusal
from tests.agents.endpoint.world import World

HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
TOOL = {"name": "search", "description": "Look it up.", "input_schema": {"type": "object"}}


def message(*messages: dict[str, Any], **given: Any) -> Ask:
    """Return the ask of a request with the messages, as hosted clients send it."""
    body = {"model": "claude", "max_tokens": 32, "messages": list(messages) or HI}
    return messages_ask(body | given, has_parser=True)


def said(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def text(words: str, **given: Any) -> dict[str, Any]:
    return {"type": "text", "text": words} | given


def call(name: str, given: dict[str, Any], number: str = "toolu_1") -> dict[str, Any]:
    return {"type": "tool_use", "id": number, "name": name, "input": given}


def called(name: str, given: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a call of a tool and its result."""
    return [said(call(name, given)), {"role": "user", "content": [result("A")]}]


def result(content: Any, number: str = "toolu_1", **given: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": number, "content": content} | given


def reply(words: str, *calls: tuple[str, str, str], finish: str = "stop", stop: str | None = None) -> Reply:
    return Reply(words, calls, finish, stop, 7, (), (5, 6, 8), (), (-0.5, -1.0, -2.0))


def events(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Return the data of server-sent events, whose name is the type in the data."""
    found = []
    for one in lines:
        name, data, *rest = one.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}" and rest == ["", ""]
    return found


def test_a_request_becomes_a_chat_in_the_clients_order(world: World) -> None:
    one = message(
        {"role": "user", "content": [text("Where", cache_control={"type": "ephemeral"}), text(" is it?")]},
        said(
            {"type": "thinking", "thinking": "hm", "signature": ""},
            text("I look."),
            call("search", {"q": "a"}, "toolu_1"),
            call("search", {"q": "b"}, "toolu_2"),
        ),
        {"role": "user", "content": [result([text("B")], "toolu_2"), result("A"), text("Go "), text("on.")]},
        {"role": "system", "content": "Be quick."},
        system=[
            text("x-anthropic-billing-header: cc_version=1"),
            text("You are an agent."),
            text("Be kind."),
        ],
        tools=[TOOL | {"cache_control": {"type": "ephemeral"}, "type": "custom"}],
        tool_choice={"type": "auto", "disable_parallel_tool_use": False},
        stop_sequences=["END"],
        temperature=1.0,
        metadata={"user_id": "u"},
        thinking={"type": "adaptive"},
    )
    assert [m["role"] for m in one.messages] == [
        "system", "user", "assistant", "tool", "tool", "user", "system",
    ]  # fmt: skip
    assert [m["content"] for m in one.messages] == [
        "You are an agent.\n\nBe kind.", "Where is it?", "I look.", "B", "A", "Go on.", "Be quick.",
    ]  # fmt: skip
    assert [one.messages[place]["tool_call_id"] for place in (3, 4)] == ["toolu_2", "toolu_1"]
    assert one.messages[2]["reasoning_content"] == "hm"
    assert [c["function"]["arguments"] for c in one.messages[2]["tool_calls"]] == [{"q": "a"}, {"q": "b"}]
    assert one.tools == [
        {
            "type": "function",
            "function": {"name": "search", "description": "Look it up.", "parameters": {"type": "object"}},
        }
    ]
    assert (one.api, one.max_tokens, one.stop, one.thinking, one.stream) == (
        "messages", 32, ("END",), True, False,
    )  # fmt: skip


def test_a_number_is_equal_in_each_form_in_which_clients_write_it(world: World) -> None:
    """JavaScript writes 1.0 as 1, and 1e16 with all of its digits, at any depth and in any order."""
    sampled, repeated = ({"q": 1.0, "r": [2.0, 0.5]}, {"r": [2, 0.5], "q": 1})
    assert message(*called("f", sampled)).units == message(*called("f", repeated)).units
    asked = [message(*called("search", {"q": q})).units for q in (1.0, 1, 1e16, 10**16, 1.5)]
    assert asked[0] == asked[1] != asked[2] == asked[3] != asked[4] != asked[0]


def test_results_and_texts_of_a_user_keep_their_order(world: World) -> None:
    calls = said(call("f", {}, "1"), call("f", {}, "2"))
    results = [result("c", "2"), result(None, "1"), text("a"), text("b")]
    one = message(calls, {"role": "user", "content": results})
    assert [(m["role"], m["content"]) for m in one.messages[1:]] == [
        ("tool", "c"),
        ("tool", ""),
        ("user", "ab"),
    ]


def test_what_hosted_clients_add_changes_neither_history_nor_retry(world: World) -> None:
    plain = message({"role": "user", "content": "hi"}, said(text("a")), HI[0])
    noisy = message(
        {"role": "user", "content": [text("hi", cache_control={"type": "ephemeral"})]},
        said(text("a", citations=None)),
        {"role": "user", "content": [text("hi")]},
        metadata={"user_id": "u"},
        service_tier="auto",
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "high"},
        thinking={"type": "enabled", "budget_tokens": 2000},
    )
    assert (plain.units, plain.kind, plain.digest) == (noisy.units, noisy.kind, noisy.digest)


def test_what_is_not_supported_is_refused_in_one_line(world: World) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}
    user = {"role": "user"}
    for given, expected in (
        ({"mcp_servers": [{"url": "x"}]}, "'mcp_servers' is not supported"),
        ({"container": "c"}, "'container' is not supported"),
        ({"tool_choice": {"type": "any"}, "tools": [TOOL]}, "tool_choice: only auto and none"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]: 'web_search_2025"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format: not supported"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management:"),
        ({"messages": [user | {"content": [image]}]}, "messages[0].content[0]: the type 'image' is"),
        ({"messages": [HI[0], said(call("f", {})), HI[0]]}, "messages: a call of a tool has no result"),
        ({"messages": [user | {"content": [result("a")]}]}, "messages: there is a result of a tool, but no"),
        ({"messages": [user | {"content": [result([image])]}]}, "messages[0].content[0].content[0]:"),
        ({"messages": [said({"type": "redacted_thinking", "data": "x"})]}, "messages[0].content[0]: the"),
        ({"messages": [HI[0], said(text("The answer is"))]}, "messages: the last one is the assistant's"),
        ({"messages": [said({"type": "tool_use", "name": "f", "input": [1]})]}, "messages[0].content[0]:"),
        ({"messages": []}, "messages: must have at least one message"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences: has 17 texts; the endpoint takes at most 16"),
        ({"stop_sequences": ["END", " \n"]}, "stop_sequences: each must have more than white space"),
        ({"max_tokens": 0}, "max_tokens: must be at least 1"),
        ({"max_tokens": "5"}, "max_tokens: must be a number"),
        ({"max_tokens": None}, "max_tokens: must be given"),
        ({"temperature": "hot"}, "temperature: must be a number"),
        (
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}, "tools": [TOOL]},
            "tool_choice.disable_parallel_tool_use: not supported",
        ),
        ({"thinking": "much"}, "thinking: must be an object"),
    ):  # fmt: skip
        assert refusal(lambda g=given: message(**g)).startswith(f"400 {expected}"), given
    unparsed = {"messages": HI, "max_tokens": 9, "tools": [TOOL]}
    assert refusal(lambda: messages_ask(unparsed, has_parser=False)).startswith(
        "400 tools: environment.tool_parser is not set"
    )
    assert messages_ask({"messages": HI}, has_parser=True, counts=True), "which has no max_tokens"


def test_any_value_in_any_place_is_accepted_or_refused_in_one_line(world: World) -> None:
    for value in VALUES:
        for field in (*ACCEPTED, *IGNORED, "made_up"):
            said_ = refusal(lambda f=field, v=value: message(**{f: v}))
            assert said_ == "not refused" or said_.startswith("400 "), (field, value, said_)
        for role in ("user", "assistant", "system", value):
            for kind in ("text", "thinking", "tool_use", "tool_result", "image", value):
                for part in ("text", "thinking", "input", "name", "content", "tool_use_id", "id"):
                    block = call("f", {}) | result("a") | {"type": kind, part: value}
                    one = {"role": role, "content": [block]}
                    said_ = refusal(lambda o=one: message(o, HI[0]))
                    assert said_ == "not refused" or said_.startswith("400 "), (one, said_)
        for part in ("name", "description", "input_schema", "type"):
            said_ = refusal(lambda p=part, v=value: message(tools=[TOOL | {p: v}]))
            assert said_ == "not refused" or said_.startswith("400 "), (part, value, said_)


def test_a_stream_starts_fills_and_stops_each_block(world: World) -> None:
    one = message(thinking={"type": "adaptive"})
    answer = reply("<think>\nhm\n</think>\n\nI look.", ("c1", "f", '{"a": 1}'), finish="tool_calls")
    seen = events(messages_events(answer, "m", one))
    assert [event["type"] for event in seen] == [
        "message_start",
        *("content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_stop") * 2,
        "message_delta",
        "message_stop",
    ]
    assert seen[0]["message"]["usage"]["input_tokens"] == 7 and seen[0]["message"]["content"] == []
    assert [event.get("index") for event in seen] == [None, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2, None, None]
    assert seen[1]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    assert seen[2]["delta"] == {"type": "thinking_delta", "thinking": "hm"}
    assert seen[5]["content_block"] == {"type": "text", "text": ""}
    assert seen[6]["delta"] == {"type": "text_delta", "text": "I look."}
    assert seen[8]["content_block"] == {"type": "tool_use", "id": "c1", "name": "f", "input": {}}
    assert seen[9]["delta"] == {"type": "input_json_delta", "partial_json": '{"a": 1}'}
    assert seen[11]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert seen[11]["usage"] == {"output_tokens": 3}
    whole = messages_object(answer, "m", one)
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use"]
    assert whole["content"][2]["input"] == {"a": 1} and whole["usage"]["output_tokens"] == 3


def test_thinking_is_text_unless_the_request_has_thinking(world: World) -> None:
    (block,) = messages_object(reply("<think>hm</think>Hi"), "m", message())["content"]
    assert block == {"type": "text", "text": "<think>hm</think>Hi"}


def test_reasons_to_stop_and_empty_replies(world: World) -> None:
    one, called = message(), ("c1", "f", "{}")
    for answer, expected, kinds in (
        (reply("a"), ("end_turn", None), ["text"]),
        (reply(""), ("end_turn", None), ["text"]),
        (reply("a", finish="length"), ("max_tokens", None), ["text"]),
        (reply("a", stop="END"), ("stop_sequence", "END"), ["text"]),
        (reply("\n", called, finish="tool_calls"), ("tool_use", None), ["tool_use"]),
        (reply("", called, finish="length"), ("max_tokens", None), ["tool_use"]),
    ):
        whole = messages_object(answer, "m", one)
        assert (whole["stop_reason"], whole["stop_sequence"]) == expected, answer
        assert [block["type"] for block in whole["content"]] == kinds, answer


def test_errors_have_the_form_of_the_api(world: World) -> None:
    for status, kind in ((400, "invalid_request_error"), (401, "authentication_error"), (500, "api_error")):
        error = messages_error(Refusal(status, "no"))
        assert error == {"type": "error", "error": {"type": kind, "message": "no"}}
    long = messages_error(Refusal(400, "the prompt has 9 tokens", "context_length_exceeded"))
    assert long["error"]["message"] == "prompt is too long: the prompt has 9 tokens"


def test_a_conversation_with_thinking_and_calls_is_one_history(world: World) -> None:
    one = recorder(world, parser=ToolParserManager.get_tool_parser("hermes"))
    settings: dict[str, Any] = {"tools": [TOOL], "thinking": {"type": "adaptive"}}
    first = message(**settings)
    assert asked(one, first)[0] == 0
    written = (
        '<think>\nhm\n</think>\n\nI look.\n<tool_call>{"name": "search", "arguments": {"q": 1.0}}</tool_call>'
    )
    blocks = messages_object(answered(one, written), "m", first)["content"]
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use"]
    blocks[0]["signature"] = ""
    blocks[2]["input"] = {"q": 1}
    results = {"role": "user", "content": [result("found", blocks[2]["id"], is_error=False), text("And?")]}
    again = message(HI[0], said(*blocks), results, **settings)
    assert asked(one, again) == (
        0,
        "\n<|im_start|>tool\nfound<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n",
    )
    assert one.count(again) == len(one._histories._recorded[0].tokens) + len(one._current[2])  # type: ignore[index]
    answered(one, "done")
    dropped = message(HI[0], said(*blocks[1:]), results, **settings)
    assert asked(one, dropped)[0] == 1, "without the thinking that was sampled"


def test_arguments_that_are_no_object_make_a_completion_of_text(world: World) -> None:
    one = recorder(world, parser=ToolParserManager.get_tool_parser("hermes"))
    for number, arguments in enumerate(
        ("[1]", '"x"', "null", '{"a": NaN}', '{"a":' * 3000 + "1" + "}" * 3000)
    ):
        asked(one, message({"role": "user", "content": str(number)}, tools=[TOOL]))
        written = f'<tool_call>{{"name": "search", "arguments": {arguments}}}</tool_call>'
        if len(written) < 200:
            assert (answered(one, written).text, one.tool_calls) == (written, 0), arguments
        else:
            assert not answered(one, written).calls
        assert one.malformed_calls == number + 1


def test_over_the_wire(world: World) -> None:
    async def play(endpoint: Any, mine: Any, other: Any) -> None:
        body = {"model": "m", "max_tokens": 9, "messages": HI}
        status, answer = await ask(endpoint, mine, mine.token, body, path="messages?beta=true")
        assert (status, json.loads(answer)["content"]) == (200, [text("yes")])
        status, answer = await ask(endpoint, mine, mine.token, body | {"stream": True}, path="messages")
        assert status == 200 and "event: message_stop" in answer and "[DONE]" not in answer
        status, answer = await ask(endpoint, mine, mine.token, body | {"n": 2}, path="messages")
        assert (status, json.loads(answer)["error"]["type"]) == (400, "invalid_request_error")
        status, answer = await ask(endpoint, mine, "wrong", body, path="messages")
        assert (status, json.loads(answer)["error"]["type"]) == (401, "authentication_error")
        content = json.dumps(body).encode()
        keyed = head(mine, mine.token, len(content), path="messages").replace(
            b"Authorization: Bearer", b"x-api-key:"
        )
        assert (await send(endpoint, keyed + content))[0] == 200
        for name in (mine.name, "unknown"):
            reached = f"HEAD /{name} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
            assert await send(endpoint, reached) == (200, "")

    serving(world, play)
