"""What a client may send: bodies, fields, messages."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from megatron_stppo.endpoint import body
from megatron_stppo.endpoint.asks import chat_ask, text_ask
from megatron_stppo.endpoint.chat_messages import compared, template_messages
from megatron_stppo.endpoint.refusal import Refusal
from tests.endpoint.world import World

HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}


def refusal(function: Callable[[], object]) -> str:
    try:
        function()
    except Refusal as error:
        assert "\n" not in str(error)
        return f"{error.status} {error}"
    return "not refused"


def chat(**given: Any) -> Any:
    return chat_ask({"messages": HI} | given, has_parser=True)


def test_sampling_of_the_client_is_ignored(world: World) -> None:
    ask = chat(
        model="gpt-4o", temperature=0.0, top_p=0.1, seed=3, presence_penalty=1.0, user="me", max_tokens=9
    )
    assert (ask.max_tokens, ask.stop, ask.units) == (9, (), chat().units)


def test_what_would_change_the_tokens_is_refused_in_one_line(world: World) -> None:
    for field, value in {
        "n": 2, "logit_bias": {"5": 1}, "response_format": {"type": "json_object"}, "top_logprobs": 3,
        "min_tokens": 4, "ignore_eos": True, "chat_template": "{{ 1 }}", "continue_final_message": True,
        "documents": [{"a": "b"}], "made_up": 1, "prompt_logprobs": 1, "x" * 99: 1,
    }.items():  # fmt: skip
        assert refusal(lambda f=field, v=value: chat(**{f: v})).startswith(
            f"400 '{field[:40]}' is not supported"
        )
    assert refusal(lambda: chat(tools=[TOOL], tool_choice="required")).startswith(
        "400 tool_choice: only auto"
    )
    assert refusal(lambda: chat_ask({"messages": HI, "tools": [TOOL]}, has_parser=False)) == (
        "400 tools: environment.tool_parser is not set; name vLLM's parser for the model"
    )
    assert refusal(lambda: text_ask({"prompt": "a", "echo": True})).startswith("400 'echo' is not supported")
    assert refusal(lambda: text_ask({"prompt": ["a", "b"]})).startswith("400 prompt: must be one text")
    assert refusal(lambda: text_ask({"prompt": "a", "logprobs": 5})).startswith("400 logprobs")


def test_fields_with_their_default_are_accepted(world: World) -> None:
    ask = chat(
        n=1, logit_bias=None, response_format=None, top_logprobs=0, min_tokens=0, bad_words=[], tools=None
    )
    assert ask.request is None


def test_wrong_values_are_refused_with_the_field(world: World) -> None:
    for given, said in (
        ({"messages": []}, "messages: must have at least one message"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages",
        ),
        ({"max_tokens": 0}, "max_tokens: must be at least 1"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stream": 7.5}, "stream"),
    ):
        assert refusal(lambda g=given: chat(**g)).startswith(f"400 {said}"), given


def test_a_body_is_bounded_utf8_json(world: World) -> None:
    for content, said in (
        (b"[1]", "400 the body must be a JSON object"),
        (b"{", "400 the body is not valid JSON"),
        (b'{"a": NaN}', "400 the body is not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "400 the body is not valid JSON"),
        (b'{"a": "\xff"}', "400 the body is not valid UTF-8"),
        (b'{"a": "\\ud800"}', "400 the body has an unpaired surrogate"),
        (b'{"a": ' + b"[" * 64 + b"]" * 64 + b"}", "400 the body is nested deeper than 64 levels"),
        (b"[" * 10**6, "400 the body is nested deeper than 64 levels"),
        (b" " * (body.MAX_BYTES + 1), "413 the body is larger than 4194304 bytes"),
    ):
        assert refusal(lambda c=content: body.read(c)) == said
    text = '"' + "[" * 1000 + '\\"' + "{" * 1000 + '"'
    assert body.read(f'{{"a": {text}}}'.encode())["a"] == json.loads(text), "brackets in a string are text"


def test_messages_are_compared_without_what_clients_change(world: World) -> None:
    def one(**message: Any) -> Any:
        return compared(template_messages([{"role": "assistant"} | message])[0])

    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1, "b": 2}'}}
    same = {"id": "2", "type": "function", "function": {"name": "f", "arguments": '{"b":2,"a":1}'}}
    assert one(content="Hi\n", refusal=None) == one(content=[{"type": "text", "text": " Hi"}])
    assert one(content=None, tool_calls=[call]) == one(content="", tool_calls=[same])
    assert one(content="Hi") != one(content="Ho")
    assert one(role="user", content="a ") != one(role="user", content="a")
