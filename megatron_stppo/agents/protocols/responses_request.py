"""What a request of OpenAI's Responses API asks for: it is translated into a request for a chat.

Nothing is stored between requests, so each one has the whole conversation in `input`. Ids, statuses and
annotations have no effect. docs/agents.md has the fields for users.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from megatron_stppo.agents.protocols.asks import Ask, translated
from megatron_stppo.agents.protocols.body import Refusal, fields, objects, texts, unsupported

ACCEPTED = frozenset(
    "input instructions tools tool_choice max_output_tokens stream reasoning include text".split()
)
IGNORED = frozenset(
    "model temperature top_p user store metadata service_tier safety_identifier prompt_cache_key "
    "prompt_cache_retention prompt_cache_options parallel_tool_calls stream_options client_metadata".split()
)
DEFAULTS = {"background": (False,), "top_logprobs": (0,), "truncation": ("disabled",)}
BETWEEN = "__"  # a namespace and the name of its function, as in vLLM
SEALED = "reasoning.encrypted_content"
SEAL = "megatron_stppo:"  # begins thinking that the endpoint has sent as encrypted_content
NAMES = {"max_tokens": "max_output_tokens", "messages": "input"}
ITEMS = ("message", "reasoning", "function_call", "function_call_output")


def responses_ask(body: Mapping[str, Any], has_parser: bool) -> Ask:
    """Return what POST /v1/responses asks for. Raises Refusal.

    Thinking is an item of its own in the reply if the request has `reasoning`; else it is part of the text.
    """
    if body.get("previous_response_id") is not None or body.get("conversation") is not None:
        raise Refusal(400, "previous_response_id, conversation: nothing is stored; send the whole `input`")
    given = fields(body, ACCEPTED, IGNORED, DEFAULTS)
    include, text = given.get("include", []), given.get("text", {})
    if not isinstance(include, list) or any(value != SEALED for value in include):
        raise Refusal(400, f"include: only {SEALED} is supported")
    if not isinstance(text, dict) or text.get("format") not in (None, {"type": "text"}):
        raise Refusal(400, "text.format: only text is supported; others would change the sampling")
    choice = given.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise Refusal(400, "tool_choice: only auto and none are supported, which do not change the sampling")
    tools = list(_tools(objects("tools", given.get("tools", []))))
    chat = {
        "messages": list(_conversation(given)),
        "tools": [tool for tool, _ in tools],
        "tool_choice": choice if tools else None,
        "max_tokens": given.get("max_output_tokens"),
        "stream": given.get("stream"),
    }
    ask = translated(chat, has_parser, NAMES, in_order=False)
    ask.api, ask.thinking, ask.sealed = "responses", bool(given.get("reasoning")), SEALED in include
    ask.namespaces = {tool["function"]["name"]: space for tool, space in tools}
    return ask


def _conversation(given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the messages of a chat, in the client's order."""
    instructions, items = given.get("instructions"), given.get("input", [])
    if instructions is not None:
        yield {"role": "system", "content": texts("instructions", instructions, ("input_text",), "system")}
    if isinstance(items, str):
        yield {"role": "user", "content": items}
        return
    turn = _Turn()
    for where, item in objects("input", items):
        kind = item.get("type", "message" if "role" in item else None)
        if kind == "reasoning":
            yield from turn.think(_thinking(where, item))
        elif kind == "function_call":
            turn.call(_call(where, item))
        elif kind == "message" and item.get("role") == "assistant":
            yield from turn.say(texts(f"{where}.content", item.get("content"), ("output_text", "input_text")))
        else:
            yield from turn.end()
            yield _read(where, kind, item)
    yield from turn.end()


class _Turn:
    """The assistant's turn that is read: thinking, then a text, then calls of tools.

    Example: think("hm"), say("I look."), call(..) and end() yield one message.
    """

    def __init__(self) -> None:
        self._thinking: list[str] = []
        self._text: str | None = None
        self._calls: list[dict[str, Any]] = []

    def think(self, text: str) -> Iterator[dict[str, Any]]:
        if self._text is not None or self._calls:
            yield from self.end()
        self._thinking.append(text)

    def say(self, text: str) -> Iterator[dict[str, Any]]:
        if self._text is not None or self._calls:
            yield from self.end()
        self._text = text

    def call(self, call: dict[str, Any]) -> None:
        self._calls.append(call)

    def end(self) -> Iterator[dict[str, Any]]:
        """Yield the message of the turn, if there is one, and begin the next."""
        message: dict[str, Any] = {"role": "assistant", "content": self._text or ""}
        if thinking := "".join(self._thinking):
            message["reasoning_content"] = thinking
        if self._calls:
            message["tool_calls"] = self._calls
        if self._text is not None or len(message) > 2:
            yield message
        self._thinking, self._text, self._calls = [], None, []


def _read(where: str, kind: Any, item: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message of what the policy reads: of a user, of the system or of a tool."""
    if kind == "message":
        if (role := item.get("role")) not in ("user", "system", "developer"):
            raise Refusal(400, f"{where}.role: must be user, assistant, system or developer")
        return {
            "role": role,
            "content": texts(f"{where}.content", item.get("content"), ("input_text",), role),
        }
    if kind == "function_call_output":
        text = texts(f"{where}.output", item.get("output"), ("input_text", "output_text"))
        return {"role": "tool", "content": text, "tool_call_id": str(item.get("call_id", ""))}
    raise unsupported(where, kind, ITEMS)


def _thinking(where: str, item: Mapping[str, Any]) -> str:
    """Return the thinking of a reasoning item: its content, or what the endpoint has sent as encrypted."""
    if content := item.get("content"):
        return texts(f"{where}.content", content, ("reasoning_text",))
    sealed = item.get("encrypted_content")
    if sealed is not None and not (isinstance(sealed, str) and sealed.startswith(SEAL)):
        raise Refusal(400, f"{where}.encrypted_content: this endpoint has not sent it")
    return (sealed or "").removeprefix(SEAL)


def _call(where: str, item: Mapping[str, Any]) -> dict[str, Any]:
    name, arguments, namespace = item.get("name"), item.get("arguments"), item.get("namespace")
    if not isinstance(name, str) or not isinstance(arguments, str):
        raise Refusal(400, f"{where}: needs a name and arguments, which are texts")
    flat = name if namespace is None else _flat(where, namespace, name)
    function = {"name": flat, "arguments": arguments}
    return {"type": "function", "id": str(item.get("call_id", "")), "function": function}


def _tools(listed: Iterable[tuple[str, dict[str, Any]]]) -> Iterator[tuple[dict[str, Any], str | None]]:
    """Yield the tools of a chat with their namespaces. Codex sends those of an MCP server as a namespace."""
    for where, tool in listed:
        if tool.get("type") != "namespace":
            yield _tool(where, tool), None
            continue
        for inside, one in objects(f"{where}.tools", tool.get("tools")):
            space, named = tool.get("name"), _tool(inside, one)
            named["function"]["name"] = _flat(inside, space, one.get("name"))
            yield named, space


def _tool(where: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise unsupported(where, tool.get("type"), ("function",))
    fields = ("name", "description", "parameters", "strict")
    named = {name: tool[name] for name in fields if tool.get(name) is not None}
    return {"type": "function", "function": named}


def _flat(where: str, namespace: Any, name: Any) -> str:
    """Return the name by which the policy calls a function of a namespace."""
    if not isinstance(namespace, str) or not isinstance(name, str):
        raise Refusal(400, f"{where}: needs a name and a namespace, which are texts")
    return f"{namespace}{BETWEEN}{name}"
