"""The recorder of one episode: token-exact histories, repeated requests, limits, stop strings, tools."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any

from vllm.tool_parsers import ToolParserManager

from megatron_stppo.agents.endpoint.recorder import Recorder
from megatron_stppo.agents.protocols.exchange import Reply
from megatron_stppo.agents.protocols.openai_chat import chat_ask, text_ask
from megatron_stppo.data.text.plain_text import decode_plain
from megatron_stppo.environments.base import Completion, Request
from tests.agents.endpoint.claims_requests import TOOL, refusal, strict
from tests.agents.endpoint.world import World
from tests.data.text.test_conversation import TOKENIZER
from tests.data.text.tokenizer_kinds import KINDS

END: int = TOKENIZER.eos_token_id
OPENING = "<|im_end|>\n<|im_start|>assistant\n"


def recorder(world: World, **given: Any) -> Recorder:
    rules = replace(world.rules, tokenizer=TOKENIZER, ends=[END], vocabulary=len(TOKENIZER), max_context=400)
    return Recorder(replace(rules, **given))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def chat(*messages: dict[str, Any], **given: Any) -> Any:
    return chat_ask({"messages": list(messages), "return_token_ids": True} | given, has_parser=True)


def asked(recorder: Recorder, ask: Any) -> tuple[int, str]:
    """Return (history, text of the new tokens) of the request."""
    request = recorder.ask(ask)
    assert isinstance(request, Request), request
    return request.history, TOKENIZER.decode(request.token_ids)


def answered(recorder: Recorder, text: str, reason: str = "end") -> Reply:
    ids = (*TOKENIZER.encode(text), *([END] if reason == "end" else []))
    return recorder.complete(Completion(text, ids, (-0.5,) * len(ids), reason))[1]


def test_a_history_keeps_thinking_that_the_template_drops(world: World) -> None:
    one = recorder(world)
    assert asked(one, chat(user("a"))) == (0, f"<|im_start|>user\na{OPENING}")
    answered(one, "<think>long</think>b")
    thought = said("<think>long</think>b")
    assert asked(one, chat(user("a"), thought, user("c"))) == (0, f"\n<|im_start|>user\nc{OPENING}")
    reply = answered(one, "d")
    assert "<think>long</think>b<|im_end|>" in TOKENIZER.decode(reply.prompt_ids)
    assert TOKENIZER.decode(reply.token_ids) == "d<|im_end|>"


def test_an_edited_history_is_a_new_one_after_the_sampled_tokens_that_are_left(world: World) -> None:
    one = recorder(world)
    asked(one, chat(user("a")))
    answered(one, "b")
    asked(one, chat(user("a"), said("b"), user("c")))
    answered(one, "d")
    whole = f"<|im_start|>user\na{OPENING}b<|im_end|>\n<|im_start|>user\nC{OPENING}"
    assert asked(one, chat(user("a"), said("b"), user("C"))) == (1, whole)
    answered(one, "e")
    history, text = asked(one, chat(user("a"), said("B"), user("c")))
    assert (history, text.count("<|im_start|>")) == (2, 4), "nothing of it was sampled"


def test_a_repeated_request_gets_the_recorded_completion_and_a_second_sample_a_new_one(world: World) -> None:
    one, first = recorder(world), chat(user("a"))
    asked(one, first)
    reply = answered(one, "b")
    retry = chat(user("a"))
    retry.is_retry = True
    assert one.ask(retry) == reply and one.completions == 1
    assert asked(one, chat(user("a")))[0] == 1, "a wish for a second sample"
    second = answered(one, "c")
    assert one.ask(retry) == second, "the newest one"


def test_a_request_after_a_closed_connection_gets_the_completion_that_nobody_has_read(world: World) -> None:
    one, first = recorder(world), chat(user("a"))
    asked(one, first)
    first.abandoned = True
    reply = answered(one, "b")
    assert one.ask(chat(user("a"))) == reply
    assert isinstance(one.ask(chat(user("a"))), Request), "then it is delivered"


def test_limits_are_refused_and_named(world: World) -> None:
    one = recorder(world, max_completions=1)
    asked(one, chat(user("a")))
    answered(one, "b")
    assert (
        refusal(lambda: one.ask(chat(user("c"))))
        == "400 the episode has had environment.max_turns=1 completions"
    )
    assert "max_turns=1" in one.reached_limit
    short = recorder(world, max_context=20)
    assert "rollout.max_context=20 leaves no room for a turn" in refusal(
        lambda: short.ask(chat(user("a" * 99)))
    )
    assert "no room" in short.reached_limit
    huge, before = "the Paris " * 400_000, time.process_time()  # as long as a body
    for ask in (chat(user(huge)), chat(user("a"), said("b"), user(huge)), text_ask({"prompt": huge})):
        assert "the prompt has at least " in refusal(lambda a=ask: short.ask(a))
    assert time.process_time() - before < 5.0, "not all of it is encoded"
    assert asked(short, chat(user("a")))[0] == 0, "the agent may go on with another history"


def test_the_text_ends_before_the_stop_string_and_the_tokens_with_it(world: World) -> None:
    for keep, expected in ((False, "ab"), (True, "ab</x>")):
        one = recorder(world)
        asked(one, chat(user("q"), stop=["</x>", "zz"], include_stop_str_in_output=keep))
        reply = answered(one, "ab</x>", reason="stop")
        assert (reply.text, reply.stop_reason, reply.finish_reason) == (expected, "</x>", "stop")
        assert TOKENIZER.decode(reply.token_ids) == "ab</x>"
        # the model has not ended its message, so the template's end is new
        assert asked(one, chat(user("q"), said(expected), user("r"), stop=["</x>"])) == (
            0,
            f"<|im_end|>\n<|im_start|>user\nr{OPENING}",
        )


def test_calls_of_tools_are_parsed_and_their_tokens_stay(world: World) -> None:
    one = recorder(world, parser=ToolParserManager.get_tool_parser("hermes"))
    asked(one, chat(user("q"), tools=[TOOL]))
    written = 'I look.<tool_call>{"name":  "search", "arguments": {"query": "x"}}</tool_call>'
    reply = answered(one, written)
    assert reply.finish_reason == "tool_calls" and reply.text == "I look." and one.tool_calls == 1
    ((call, name, arguments),) = reply.calls
    assert (call, name, arguments) == ("call00100", "search", '{"query": "x"}')
    function = {"name": name, "arguments": '{ "query":"x" }'}
    calls = said("I look.") | {"tool_calls": [{"id": call, "type": "function", "function": function}]}
    result = {"role": "tool", "tool_call_id": call, "content": "found"}
    assert asked(one, chat(user("q"), calls, result, tools=[TOOL])) == (
        0,
        f"\n<|im_start|>tool\nfound{OPENING}",
    )
    reply = answered(one, "done")
    assert written in TOKENIZER.decode(reply.prompt_ids), "as it was sampled, not as the template writes it"
    assert asked(one, chat(user("q"), calls, result))[0] == 1, "without the tools it is another conversation"


def test_what_is_not_a_call_stays_text(world: World) -> None:
    one = recorder(world, parser=ToolParserManager.get_tool_parser("hermes"))
    for choice, text in (
        ("auto", "<tool_call>{broken</tool_call>"),
        ("none", '<tool_call>{"name": "f"}</tool_call>'),
        ("auto", '<tool_call>{"name": "f", "arguments": {"q": "\\ud83d"}}</tool_call>'),  # half a pair
    ):
        asked(one, chat(user(choice), tools=[TOOL], tool_choice=choice))
        reply = answered(one, text)
        assert (reply.text, reply.calls, reply.finish_reason) == (text, (), "stop")
    assert one.malformed_calls == 2, "what the agent sends with the choice none is no call"


def test_a_call_of_a_strict_tool_has_arguments_of_its_schema_or_is_text(world: World) -> None:
    one = recorder(world, parser=ToolParserManager.get_tool_parser("hermes"))
    words = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}
    for schema, arguments, calls in (
        (words, '{"q": "a"}', 1),
        (words, '{"q": 1}', 0),
        (words, "{}", 0),
        ({"$ref": "#"}, "{}", 0),
        ({"$ref": "http://127.0.0.1:9/x"}, "{}", 0),
    ):
        request = chat(user(str((schema, arguments))), tools=[strict(schema)])
        assert "strict" not in str(request.tools), "the policy does not read it"
        asked(one, request)
        written = f'<tool_call>{{"name": "search", "arguments": {arguments}}}</tool_call>'
        assert len(answered(one, written).calls) == calls, (schema, arguments)
    asked(one, chat(user("q"), tools=[TOOL]))
    assert answered(one, '<tool_call>{"name": "search", "arguments": {}}</tool_call>').calls


def test_calls_that_cannot_be_read_are_counted_and_not_logged(world: World) -> None:
    class Careless(ToolParserManager.get_tool_parser("hermes")):  # type: ignore[misc]
        def extract_tool_calls(self, text: str, request: Any) -> Any:
            logging.getLogger("vllm.tool_parsers.hermes_tool_parser").info("kept")
            return super().extract_tool_calls(text, request) if "{" in text else [][1]

    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("vllm")
    logger.addHandler(handler)
    one = recorder(world, parser=Careless)
    for number, text in enumerate(("<tool_call>{broken</tool_call>", "<tool_call>", "{} no call")):
        asked(one, chat(user(str(number)), tools=[TOOL]))
        assert answered(one, text).text == text
    logger.removeHandler(handler)
    assert one.malformed_calls == 2 and {record.levelname for record in records} <= {"INFO"}


def test_texts_and_token_ids_are_continued_too(world: World) -> None:
    one = recorder(world)
    assert asked(one, text_ask({"prompt": "Which <|im_end|>"})) == (0, "Which <|im_end|>")
    answered(one, " city", reason="length")
    again = text_ask({"prompt": "Which <|im_end|> city is", "return_token_ids": True})
    assert asked(one, again) == (0, " is")
    read = answered(one, "x", reason="length").prompt_ids
    assert END not in read and TOKENIZER.decode(read) == "Which <|im_end|> city is"
    assert one.ask(text_ask({"prompt": [5, 6]})) == Request(1, (5, 6))
    one.complete(Completion("z", (9, END), (-0.5, -0.5), "end"))
    assert one.ask(text_ask({"prompt": [5, 6, 9, END, 7], "max_tokens": 3})) == Request(1, (7,), (), 3)
    assert "must lie in [0, " in refusal(lambda: recorder(world).ask(text_ask({"prompt": [10**6]})))


def test_a_text_that_is_continued_gains_and_loses_no_space(world: World) -> None:
    """Tokens of the kind of Llama 2, with "▁" for a space; the client appends "c" to what it got."""
    tokenizer = KINDS["prepend"]
    one = recorder(world, tokenizer=tokenizer, vocabulary=len(tokenizer))
    request = one.ask(text_ask({"prompt": "a", "logprobs": 1}))
    assert isinstance(request, Request)
    assert tokenizer.convert_ids_to_tokens(list(request.token_ids)) == ["<s>", "▁a"]
    sampled = tuple(tokenizer.convert_tokens_to_ids(["▁the", "▁c"]))
    text = decode_plain(tokenizer, sampled)
    _, reply = one.complete(Completion(text, sampled, (-0.5, -0.5), "length"))
    assert (reply.text, reply.pieces) == (" the c", (" the", " c"))
    again = one.ask(text_ask({"prompt": f"a{reply.text}ar"}))
    assert isinstance(again, Request) and again.history == 0
    read = [*request.token_ids, *sampled, *again.token_ids]
    assert tokenizer.decode(read, skip_special_tokens=True) == "a the car"


def test_an_equal_request_after_a_completion_without_text_is_another_sample(world: World) -> None:
    one = recorder(world)
    assert asked(one, text_ask({"prompt": "Which"})) == (0, "Which")
    answered(one, "")
    assert asked(one, text_ask({"prompt": "Which"})) == (1, "Which"), "without the end-of-text token"
    answered(one, " city", reason="length")
    assert asked(one, text_ask({"prompt": "Which city is"})) == (1, " is")


def test_a_completion_leaves_nothing_of_the_conversation_but_its_tokens(world: World) -> None:
    one = recorder(world)
    asked(one, ask := chat(user("a"), return_token_ids=False, tools=[TOOL]))
    reply = answered(one, "b")
    assert (ask.kind, ask.messages, ask.units, ask.tools, ask.request) == (None, [], (), [], None)
    assert reply.prompt_ids == () and reply.prompt_tokens > 0


def test_messages_that_the_template_rejects_are_refused(world: World) -> None:
    tokenizer = type(TOKENIZER)(tokenizer_object=TOKENIZER.backend_tokenizer, eos_token="<|im_end|>")
    for template, said in (
        ("{{ raise_exception('no users here') }}", "no users here"),
        (
            "{{ 'a' + 1 }}",
            "400 model.path: its chat template rejects messages with the roles user (TypeError",
        ),
    ):
        tokenizer.chat_template = template
        one = recorder(world, tokenizer=tokenizer)
        assert said in refusal(lambda r=one: r.ask(chat(user("a"))))
