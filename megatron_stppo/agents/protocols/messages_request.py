"""What a request of Anthropic's Messages API asks for: it is translated into a request for a chat.

Ids, signatures, cache_control and billing headers have no effect. docs/agents.md has the fields for users.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_stppo.agents.protocols.asks import Ask, translated
from megatron_stppo.agents.protocols.body import Refusal, fields, listed, objects, text_of, texts, unsupported

ACCEPTED = frozenset(
    "messages system tools tool_choice max_tokens stop_sequences stream thinking output_config "
    "context_management".split()
)
IGNORED = frozenset(
    "model metadata temperature top_p top_k service_tier inference_geo speed cache_control user_profile_id "
    "workspace_id diagnostics".split()
)
BILLING = "x-anthropic-billing-header"  # a block of Claude Code's system prompt, which differs per request
NAMES = {"stop": "stop_sequences"}


def messages_ask(body: Mapping[str, Any], has_parser: bool, counts: bool = False) -> Ask:
    """Return what POST /v1/messages asks for, or /v1/messages/count_tokens. Raises Refusal.

    Thinking is a block of its own in the reply if the request has `thinking`; else it is part of the text.
    """
    given = fields(body, ACCEPTED, IGNORED, {}, () if counts else ("max_tokens",))
    stops = given.get("stop_sequences", [])
    if any(isinstance(one, str) and not one.strip() for one in listed("stop_sequences", stops)):
        raise Refusal(400, "stop_sequences: each must have more than white space")
    chat = {
        "messages": list(_conversation(given)),
        "tools": [_tool(*one) for one in objects("tools", given.get("tools", []))],
        "tool_choice": _tool_choice(given.get("tool_choice")),
        "max_tokens": given.get("max_tokens"),
        "stop": stops,
        "stream": given.get("stream"),
    }
    if _object("output_config", given.get("output_config")).get("format") is not None:
        raise Refusal(400, "output_config.format: not supported; it would change the sampling")
    edits = _object("context_management", given.get("context_management")).get("edits", [])
    if not all(edit.get("keep") == "all" for _, edit in objects("context_management.edits", edits)):
        raise Refusal(400, "context_management: not supported; the endpoint never shortens a conversation")
    ask = translated(chat, has_parser, NAMES)
    ask.api, ask.counts = "messages", counts
    ask.thinking = _object("thinking", given.get("thinking")).get("type") in ("enabled", "adaptive")
    return ask


def _object(where: str, value: Any) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, dict):
        raise Refusal(400, f"{where}: must be an object")
    return value or {}


def _conversation(given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the messages of a chat, in the client's order."""
    if (system := given.get("system")) is not None:
        if text := _system("system", system):
            yield {"role": "system", "content": text}
    messages = objects("messages", given.get("messages"))
    for where, message in messages:
        role, content = message.get("role"), message.get("content")
        if role == "system":
            if text := _system(f"{where}.content", content):
                yield {"role": "system", "content": text}
            continue
        if role not in ("user", "assistant"):
            raise Refusal(400, f"{where}.role: must be user, assistant or system")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        placed = objects(f"{where}.content", blocks)
        yield from _user(placed) if role == "user" else [_assistant(placed)]
    if messages and messages[-1][1].get("role") == "assistant":
        raise Refusal(400, "messages: the last one is the assistant's; a reply cannot be begun by the client")


def _system(where: str, content: Any) -> str:
    if isinstance(content, list):
        content = [
            part
            for part in content
            if not (isinstance(part, dict) and str(part.get("text")).startswith(BILLING))
        ]
    return texts(where, content, role="system")


def _user(blocks: list[tuple[str, dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Yield a message for each result of a tool, and one for each run of texts."""
    run: list[str] = []
    for where, block in blocks:
        if block.get("type") != "tool_result":
            if block.get("type") != "text":
                raise unsupported(where, block.get("type"), ("text", "tool_result"))
            run.append(text_of(where, block))
            continue
        if run:
            yield {"role": "user", "content": "".join(run)}
            run = []
        content = block.get("content")
        text = "" if content is None else texts(f"{where}.content", content)
        yield {"role": "tool", "content": text, "tool_call_id": str(block.get("tool_use_id", ""))}
    if run or not blocks:
        yield {"role": "user", "content": "".join(run)}


def _assistant(blocks: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Return the message of one turn, whose texts are joined, and so is its thinking."""
    said: list[str] = []
    thought: list[str] = []
    calls = []
    for where, block in blocks:
        kind = block.get("type")
        if kind == "text":
            said.append(text_of(where, block))
        elif kind == "thinking" and isinstance(block.get("thinking"), str):
            thought.append(block["thinking"])
        elif kind == "tool_use":
            calls.append(_call(where, block))
        else:
            raise unsupported(where, kind, ("text", "thinking", "tool_use"))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(said)}
    if thought:
        message["reasoning_content"] = "".join(thought)
    return message | ({"tool_calls": calls} if calls else {})


def _call(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    name, given = block.get("name"), block.get("input")
    if not isinstance(name, str) or not isinstance(given, dict):
        raise Refusal(400, f"{where}: needs a name, which is text, and an input, which is an object")
    function = {"name": name, "arguments": json.dumps(given, ensure_ascii=False)}
    return {"type": "function", "id": str(block.get("id", "")), "function": function}


def _tool(where: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    if (kind := tool.get("type")) not in (None, "custom"):
        raise Refusal(
            400,
            f"{where}: {str(kind)[:40]!r} is a tool that the API runs; only the client's own are supported",
        )
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    function |= {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: Any) -> str | None:
    if _object("tool_choice", choice).get("disable_parallel_tool_use"):
        raise Refusal(
            400, "tool_choice.disable_parallel_tool_use: not supported; it would change the sampling"
        )
    kind = _object("tool_choice", choice).get("type")
    if kind not in (None, "auto", "none"):
        raise Refusal(400, "tool_choice: only auto and none are supported, which do not change the sampling")
    return kind
