"""What a client may send: bodies, fields, messages."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from megatron_stppo.agents.protocols import anthropic_messages, body, openai_responses
from megatron_stppo.agents.protocols.body import TYPES, Refusal
from megatron_stppo.agents.protocols.exchange import Ask, Reply, compared, template_messages
from megatron_stppo.agents.protocols.openai_chat import (
    ACCEPTED,
    IGNORED,
    chat_ask,
    chat_events,
    chat_object,
    text_ask,
    text_events,
    text_object,
)
from tests.agents.endpoint.world import World
from tests.documented import NAME, rows

HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}
CALL = {
    "role": "assistant",
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "search", "arguments": "{}"}}],
}
ANSWER = {"role": "tool", "tool_call_id": "c1", "content": "A"}
VALUES: list[Any] = [  # of any field
    None,
    0,
    -1,
    1.5,
    10**30,
    True,
    "",
    "x\x00",
    [],
    [[]],
    ["x"],
    [1],
    {},
    {"type": "x"},
    [{"type": "text"}],
    [{"type": "function"}],
]


def refusal(function: Callable[[], object]) -> str:
    try:
        function()
    except Refusal as error:
        assert "\n" not in str(error)
        return f"{error.status} {error}"
    return "not refused"


def chat(**given: Any) -> Any:
    return chat_ask({"messages": HI} | given, has_parser=True)


def streamed(events: Iterable[str]) -> list[dict[str, Any]]:
    *chunks, end = events
    assert end == "data: [DONE]\n\n"
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "search", "parameters": schema, "strict": True}}


def test_every_accepted_and_ignored_field_has_its_row_in_docs_agents_md(world: World) -> None:
    table = [cells for cells in rows("agents.md") if len(cells) == 2]
    written = {
        rule: [name for first, text in table if rule in text.split(":")[0] for name in NAME.findall(first)]
        for rule in ("accepted", "ignored")
    }
    assert sorted(written["ignored"]) == sorted(IGNORED)
    assert sorted(written["accepted"]) == sorted(ACCEPTED["chat"] | ACCEPTED["text"])
    for path, api in (("/v1/messages", anthropic_messages), ("/v1/responses", openai_responses)):
        (cells,) = (cells for cells in rows("agents.md") if cells[0].startswith(f"`{path}`"))
        assert sorted(NAME.findall(cells[1])) == sorted(api.ACCEPTED)
        assert sorted(NAME.findall(cells[2])) == sorted(api.IGNORED)


def test_every_ignored_field_has_a_type(world: World) -> None:
    assert IGNORED | anthropic_messages.IGNORED | openai_responses.IGNORED <= TYPES.keys()


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
    ask = chat(response_format={"type": "text"}, modalities=["text"])
    assert ask.digest == chat().digest, "they change nothing"
    assert refusal(lambda: chat(modalities=["text", "audio"])).startswith("400 'modalities' is not supported")


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
        ({"max_tokens": "5"}, "max_tokens: must be a number"),
        ({"temperature": "hot"}, "temperature: must be a number"),
        ({"temperature": True}, "temperature: must be a number"),
        ({"store": "no"}, "store: must be true or false"),
        ({"metadata": "m"}, "metadata: must be an object"),
        ({"stop": ["a"] * 17}, "stop: has 17 texts; the endpoint takes at most 16"),
        ({"stop": ["a", ""]}, "stop: must be texts of 1 to 256 characters"),
        ({"stream": 7.5}, "stream: must be true or false"),
        ({"messages": [*HI, ANSWER]}, "messages: there is a result of a tool, but no call before it: 'c1'"),
        ({"messages": [*HI, CALL]}, "messages: a call of a tool has no result, which must follow it: 'c1'"),
        ({"messages": [*HI, CALL, *HI, ANSWER]}, "messages: a call of a tool has no result"),
        ({"messages": [*HI, CALL, ANSWER, ANSWER]}, "messages: there is a result of a tool, but no call"),
        ({"tools": [strict({"type": "good"})]}, "tools[0]: its parameters are no JSON schema"),
    ):
        assert refusal(lambda g=given: chat(**g)).startswith(f"400 {said}"), given
    assert chat(messages=[*HI, CALL, ANSWER]) and chat(stop=["\n"] * 16).stop == ("\n",) * 16


def test_numbers_become_integers_that_ranks_can_exchange(world: World) -> None:
    for given, most in ((16.0, 16), (10**20, 2**31 - 1), (None, None)):
        for ask in (chat(max_tokens=given), text_ask({"prompt": "a", "max_tokens": given, "logprobs": 1})):
            assert ask.max_tokens == most and type(ask.max_tokens) is type(most), given
    assert chat(max_tokens=9, max_completion_tokens=8.0).max_tokens == 8
    assert text_ask({"prompt": "a"}).max_tokens is None, "vLLM's default of 16 is not used"


def test_a_body_is_bounded_utf8_json(world: World) -> None:
    for content, said in (
        (b"[1]", "400 the body is not a JSON object (Expected `object`"),
        (b"{", "400 the body is not a JSON object (Input data was truncated"),
        (b'{"a": NaN}', "400 the body is not a JSON object (JSON is malformed"),
        (b'{"a": ' + b"9" * 5000 + b"}", "400 the body is not a JSON object (Integer value out of range"),
        (b'{"a": "\xff"}', "400 the body is not a JSON object ('utf-8' codec"),
        (b'{"a": "\\ud800"}', "400 the body is not a JSON object ("),
        (b'{"a": "\\udc00 ."}', "400 the body is not a JSON object ("),
        (b'{"a": ' + b"[" * 64 + b"]" * 64 + b"}", "400 the body is nested deeper than 64 levels"),
        (
            b"{" + b'"a": [], ' * 2**16 + b'"b": 1}',
            "400 the body has more than 65536 lists, objects and elements",
        ),
        (b"[" * 10**6, "400 the body is nested deeper than 64 levels"),
        (b" " * (body.MAX_BYTES + 1), "413 the body is larger than 4194304 bytes"),
    ):
        assert refusal(lambda c=content: body.read(c)).startswith(said)
    text = '"' + "[" * 1000 + '\\"' + "{" * 1000 + '"'
    assert body.read(f'{{"a": {text}}}'.encode())["a"] == json.loads(text), "brackets in a string are text"


def test_a_turn_of_many_parts_takes_time_in_proportion_to_its_length(world: World) -> None:
    """The server's thread reads bodies, for all episodes. Joined one by one, these parts take minutes."""
    texts, started = ["\U0001f600" + "x" * 3_000_000, *["y"] * 8000], time.monotonic()
    for kind, field in (("text", "text"), ("thinking", "thinking")):
        said = {"role": "assistant", "content": [{"type": kind, field: text} for text in texts]}
        given: dict[str, Any] = {"max_tokens": 1, "messages": [*HI, said, *HI]}
        anthropic_messages.messages_ask(given, has_parser=True)
    thought = [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": t}]} for t in texts]
    openai_responses.responses_ask({"input": [*HI, *thought, *HI]}, has_parser=True)
    assert time.monotonic() - started < 5


def test_messages_are_compared_without_what_clients_change(world: World) -> None:
    def one(**message: Any) -> Any:
        return compared(template_messages([{"role": "assistant"} | message])[0])

    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1, "b": 2}'}}
    same = {"id": "2", "type": "function", "function": {"name": "f", "arguments": '{"b":2,"a":1}'}}
    assert one(content="Hi\n", refusal=None) == one(content=[{"type": "text", "text": " Hi"}])
    assert one(content=None, tool_calls=[call]) == one(content="", tool_calls=[same])
    assert one(content="Hi") != one(content="Ho")
    assert one(role="user", content="a ") != one(role="user", content="a")


def test_thinking_and_the_developers_message_reach_the_template(world: World) -> None:
    messages = [
        {"role": "developer", "content": "d"},
        {"role": "assistant", "content": "a", "reasoning_content": "r"},
    ]
    ask = chat(messages=[*messages, *HI])
    assert ask.messages[0] == {"role": "system", "content": "d"}
    assert ask.messages[1] == {"role": "assistant", "content": "a", "reasoning_content": "r"}


def test_a_stream_has_the_calls_of_tools_and_the_tokens_once(world: World) -> None:
    reply = Reply(
        "I look.", (("c1", "f", '{"a": 1}'),), "tool_calls", None, 2, (1, 2), (5, 6), ("x", "y"), (-0.5, -1.0)
    )
    ask: Ask = chat(stream=True, stream_options={"include_usage": True})
    chunks = streamed(chat_events(reply, "m", ask))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert [delta.get("content") for delta in deltas[:2]] == ["", "I look."]
    (call,) = deltas[2]["tool_calls"]
    assert (call["id"], call["function"]) == ("c1", {"name": "f", "arguments": '{"a": 1}'})
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    assert [choice["token_ids"] for choice in choices if "token_ids" in choice] == [[5, 6]]
    assert [len(choice["logprobs"]["content"]) for choice in choices if "logprobs" in choice] == [2]
    assert choices[-1]["finish_reason"] == "tool_calls" and chunks[-1]["usage"]["total_tokens"] == 4
    whole = chat_object(reply, "m", ask)["choices"][0]
    assert whole["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    (text, usage), plain = streamed(text_events(reply, "m", ask)), text_object(reply, "m", ask)
    assert text["choices"][0]["text"] == plain["choices"][0]["text"] == "I look."
    assert usage["usage"] == plain["usage"]
    assert plain["choices"][0]["logprobs"]["text_offset"] == [0, 1]


def test_any_value_of_any_field_is_accepted_or_refused_in_one_line(world: World) -> None:
    for field in ChatCompletionRequest.model_fields:
        for value in VALUES:
            said = refusal(lambda f=field, v=value: chat(**{f: v}))
            assert said == "not refused" or said.startswith("400 "), (field, value, said)
    for field in CompletionRequest.model_fields:
        for value in VALUES:
            said = refusal(lambda f=field, v=value: text_ask({"prompt": "a"} | {f: v}))
            assert said == "not refused" or said.startswith("400 "), (field, value, said)
    for value in VALUES:
        for message in (
            {"role": value},
            {"role": "user", "content": value},
            {"role": "assistant", "tool_calls": value},
        ):
            said = refusal(lambda m=message: chat(messages=[m]))
            assert said == "not refused" or said.startswith("400 "), (message, said)


def test_arguments_of_a_call_with_half_a_surrogate_pair_stay_text(world: World) -> None:
    function = {"name": "f", "arguments": '{"q": "\\ud83d"}'}
    calls = [{"id": "1", "type": "function", "function": function}]
    (message,) = template_messages([{"role": "assistant", "content": "", "tool_calls": calls}])
    assert message["tool_calls"][0]["function"]["arguments"] == function["arguments"]


def test_arguments_of_any_depth_are_compared(world: World) -> None:
    """Python's JSON stops at about 1000 levels, less what the stack holds."""
    for depth in range(900, 1000):
        function = {"name": "f", "arguments": '{"a":' * depth + "1" + "}" * depth}
        calls = [{"id": "1", "type": "function", "function": function}]
        (message,) = template_messages([{"role": "assistant", "content": "", "tool_calls": calls}])
        compared(message)
