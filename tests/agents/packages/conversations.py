"""Conversations recorded with given chat templates, in a process that may import vLLM; no engine."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from tests.data.text.test_chat import LLAMA, QWEN, byte_level

TOOL = {
    "type": "function",
    "function": {"name": "capital", "parameters": {"type": "object", "properties": {}}},
}
SYSTEM, QUESTION = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Which city?"}
SECOND = {"role": "user", "content": "And <|im_end|> Italy <|eot_id|>?"}
THOUGHT = "<think>\nlong\n</think>\n\n"
HERMES = '<tool_call>\n{{"name": "capital", "arguments": {{"country": "{}"}}}}\n</tool_call>'
JSON = '{{"name": "capital", "parameters": {{"country": "{}"}}}}'


SCALING = ["<|python_tag|>", *LLAMA]


@dataclass(frozen=True)
class Family:
    """What a template belongs to.

    special: its control tokens; the last ends a message. call: what the model writes to call the tool.
    between: what it writes between two calls.
    """

    special: Sequence[str]
    parser: str
    call: str
    between: str = "\n"


FAMILIES = {
    "qwen2_5": Family(QWEN, "hermes", HERMES),
    "qwen3": Family(QWEN, "hermes", HERMES),
    "qwen3_instruct_2507": Family(QWEN, "hermes", HERMES),
    "llama3_1": Family(SCALING, "llama3_json", JSON, "; "),
    "llama3_2": Family(SCALING, "llama3_json", JSON, "; "),
}


@dataclass(frozen=True)
class Asked:
    """One request. history: its number. prompt, official: the text of all tokens before the completion, and
    what the template makes of the messages, or "" if it rejects them."""

    history: int
    prompt: str
    official: str
    continues: bool  # the prompt begins with the earlier prompt and its completion, token for token


def record_all(templates: dict[str, str]) -> dict[str, Any]:
    """Return {template: {conversation: its requests, or a traceback}}."""
    return {name: _record(FAMILIES[name], template) for name, template in templates.items()}


def _record(family: Family, template: str) -> dict[str, list[Asked] | str]:
    tokenizer: Any = byte_level(list(family.special), template)
    tokenizer.bos_token = LLAMA[0]
    found: dict[str, list[Asked] | str] = {}
    for name, say in CONVERSATIONS.items():
        try:
            talk = Talk(family, tokenizer)
            say(talk)
            found[name] = talk.asked
        except Exception:
            found[name] = traceback.format_exc()
    return found


class Talk:
    """A client and a policy that says given texts. `messages` are those that the client repeats."""

    def __init__(self, family: Family, tokenizer: Any) -> None:
        from vllm.tool_parsers import ToolParserManager

        from megatron_stppo.agents.endpoint.recorder import Recorder, Rules

        self.family, self.tokenizer, self.end = family, tokenizer, tokenizer.eos_token_id
        parser = ToolParserManager.get_tool_parser(family.parser)
        self.recorder = Recorder(Rules(tokenizer, [self.end], len(tokenizer), 4000, 9, parser))
        self.messages: list[dict[str, Any]] = []
        self.asked: list[Asked] = []
        self._before: list[int] = []

    def say(self, text: str, *messages: dict[str, Any]) -> Any:
        """Send more messages. Return the reply, and append it as clients do."""
        from megatron_stppo.agents.protocols.exchange import template_messages
        from megatron_stppo.agents.protocols.openai_chat import chat_ask
        from megatron_stppo.environments.base import Completion, Request

        self.messages += messages
        given = {"messages": self.messages, "tools": [TOOL], "return_token_ids": True}
        request = self.recorder.ask(chat_ask(given, has_parser=True))
        assert isinstance(request, Request)
        ids = (*self.tokenizer.encode(text, add_special_tokens=False), self.end)
        reply = self.recorder.complete(Completion(text, ids, (-0.5,) * len(ids), "end"))[1]
        prompt = list(reply.prompt_ids)
        self.asked.append(
            Asked(
                request.history,
                self.tokenizer.decode(prompt),
                self._official(template_messages(self.messages)),
                prompt[: len(self._before)] == self._before,
            )
        )
        self._before = [*prompt, *ids]
        said = {"role": "assistant", "content": reply.text or None}
        calls = reply.tool_calls
        self.messages.append(said | ({"tool_calls": calls} if calls else {}))
        return reply

    def _official(self, messages: list[Any]) -> str:
        try:
            text: str = self.tokenizer.apply_chat_template(
                messages, tools=[TOOL], add_generation_prompt=True, tokenize=False
            )
        except TemplateError:
            return ""
        return text

    def call(self, *countries: str) -> str:
        return self.family.between.join(self.family.call.format(country) for country in countries)


def results(reply: Any, *texts: str) -> list[dict[str, str]]:
    called = zip(reply.calls, texts, strict=True)
    return [{"role": "tool", "content": text, "tool_call_id": call[0]} for call, text in called]


def one_call(talk: Talk) -> None:
    reply = talk.say(talk.call("France"), SYSTEM, QUESTION)
    talk.say("Paris.", *results(reply, "Paris"))
    talk.say("Rome.", SECOND)


def two_calls(talk: Talk) -> None:
    reply = talk.say(talk.call("France", "Italy"), QUESTION)
    talk.say("Paris, Rome.", *results(reply, "Paris", "Rome"))


def repeated_thinking(talk: Talk) -> None:
    talk.say(f"{THOUGHT}Paris.", QUESTION)
    talk.say("Rome.", SECOND)


def dropped_thinking(talk: Talk) -> None:
    talk.say(f"{THOUGHT}Paris.", QUESTION)
    talk.messages[-1]["content"] = "Paris."
    talk.say("Rome.", SECOND)


CONVERSATIONS: dict[str, Callable[[Talk], None]] = {
    "one call": one_call,
    "two calls": two_calls,
    "repeated thinking": repeated_thinking,
    "dropped thinking": dropped_thinking,
}
