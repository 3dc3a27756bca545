"""Anthropic's Messages API: a request is translated into one for a chat; a reply is an object, or events.

Ids, signatures, cache_control and billing headers have no effect. docs/agents.md has the fields for users.
"""

import itertools
import json
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_stppo.agents.protocols.body import Refusal, fields, listed, objects, text_of, texts, unsupported
from megatron_stppo.agents.protocols.exchange import Ask, AssistantTurn, Json, Reply, event, function_call
from megatron_stppo.agents.protocols.openai_chat import tool_choice, translated

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
UNSIGNED = "unsigned"  # clients require a signature of thinking
EMPTY: dict[str, Json] = {  # what a block of each type starts with in a stream
    "text": {"text": ""},
    "thinking": {"thinking": "", "signature": ""},
    "tool_use": {"input": {}},
}
ERRORS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
}


def messages_ask(body: Mapping[str, Any], has_parser: bool, counts: bool = False) -> Ask:
    """Return what POST /v1/messages asks for, or /v1/messages/count_tokens. Raises Refusal.

    Thinking is a block of its own in the reply if the request has `thinking`; else it is part of the text.
    """
    given = fields(body, ACCEPTED, IGNORED, {}, () if counts else ("max_tokens",))
    stops = given.get("stop_sequences", [])
    if any(isinstance(stop, str) and not stop.strip() for stop in listed("stop_sequences", stops)):
        raise Refusal(400, "stop_sequences: each must have more than white space")
    chat = {
        "messages": list(_conversation(given)),
        "tools": [_tool(*tool) for tool in objects("tools", given.get("tools", []))],
        "tool_choice": _tool_choice(given.get("tool_choice", {})),
        "max_tokens": given.get("max_tokens"),
        "stop": stops,
        "stream": given.get("stream"),
    }
    if given.get("output_config", {}).get("format") is not None:
        raise Refusal(400, "output_config.format: not supported; it would change the sampling")
    edits = given.get("context_management", {}).get("edits", [])
    if not all(edit.get("keep") == "all" for _, edit in objects("context_management.edits", edits)):
        raise Refusal(400, "context_management: not supported; the endpoint never shortens a conversation")
    ask = translated(chat, has_parser, NAMES)
    ask.api, ask.counts = "messages", counts
    ask.thinking = given.get("thinking", {}).get("type") in ("enabled", "adaptive")
    return ask


def _conversation(given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the messages of a chat, in the client's order."""
    if (system := given.get("system")) is not None:
        yield from _system("system", system)
    messages = objects("messages", given.get("messages"))
    for where, message in messages:
        role, content = message.get("role"), message.get("content")
        if role == "system":
            yield from _system(f"{where}.content", content)
            continue
        if role not in ("user", "assistant"):
            raise Refusal(400, f"{where}.role: must be user, assistant or system")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        placed = objects(f"{where}.content", blocks)
        yield from _user(placed) if role == "user" else [_assistant(placed)]
    if messages and messages[-1][1].get("role") == "assistant":
        raise Refusal(400, "messages: the last one is the assistant's; a reply cannot be begun by the client")


def _system(where: str, content: Any) -> Iterator[dict[str, Any]]:
    if isinstance(content, list):
        content = [
            part
            for part in content
            if not (isinstance(part, dict) and str(part.get("text")).startswith(BILLING))
        ]
    if text := texts(where, content, role="system"):
        yield {"role": "system", "content": text}


def _user(blocks: list[tuple[str, dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Yield a message for each result of a tool, and one for each run of texts."""
    for is_result, run in itertools.groupby(blocks, lambda block: block[1].get("type") == "tool_result"):
        if not is_result:
            kinds = ("text", "tool_result")
            yield {"role": "user", "content": "".join(_text(where, block, kinds) for where, block in run)}
            continue
        for where, block in run:
            content = block.get("content")
            text = "" if content is None else texts(f"{where}.content", content)
            yield {"role": "tool", "content": text, "tool_call_id": str(block.get("tool_use_id", ""))}
    if not blocks:
        yield {"role": "user", "content": ""}


def _text(where: str, block: Mapping[str, Any], kinds: tuple[str, ...]) -> str:
    """kinds: all that the content may have, for Refusal."""
    if block.get("type") != "text":
        raise unsupported(where, block.get("type"), kinds)
    return text_of(where, block)


def _assistant(blocks: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Return the message of one turn, whose texts are joined, and so is its thinking."""
    said: list[str] = []
    turn = AssistantTurn()
    for where, block in blocks:
        if block.get("type") == "thinking" and isinstance(block.get("thinking"), str):
            turn.thinking.append(block["thinking"])
        elif block.get("type") == "tool_use":
            turn.calls.append(_call(where, block))
        else:
            said.append(_text(where, block, ("text", "thinking", "tool_use")))
    turn.text = "".join(said)
    return turn.message()


def _call(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    name, given = block.get("name"), block.get("input")
    if not isinstance(name, str) or not isinstance(given, dict):
        raise Refusal(400, f"{where}: needs a name, which is text, and an input, which is an object")
    return function_call(block.get("id", ""), name, json.dumps(given, ensure_ascii=False))


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
    if not isinstance(choice, dict):
        raise Refusal(400, "tool_choice: must be an object")
    if choice.get("disable_parallel_tool_use"):
        raise Refusal(
            400, "tool_choice.disable_parallel_tool_use: not supported; it would change the sampling"
        )
    return tool_choice(choice.get("type"))


def messages_object(reply: Reply, model: str, ask: Ask) -> Json:
    """Return the reply as one object."""
    whole = _message(reply, model, written=len(reply.token_ids))
    return whole | {"content": _blocks(reply, ask)} | _stop(reply)


def messages_events(reply: Reply, model: str, ask: Ask) -> Iterator[str]:
    """Yield the reply as server-sent events: for each block its start, its content and its stop."""
    yield event("message_start", message=_message(reply, model, written=0))
    for index, block in enumerate(_blocks(reply, ask)):
        empty, deltas = _parts(block)
        yield event("content_block_start", index=index, content_block=empty)
        for delta in deltas:
            yield event("content_block_delta", index=index, delta=delta)
        yield event("content_block_stop", index=index)
    yield event("message_delta", delta=_stop(reply), usage={"output_tokens": len(reply.token_ids)})
    yield event("message_stop")


def messages_error(refusal: Refusal) -> Json:
    """Return a refusal as clients of the API read it.

    Claude Code shortens its conversation when an error says that the prompt is too long.
    """
    text = str(refusal)
    if refusal.code == "context_length_exceeded":
        text = f"prompt is too long: {text}"
    kind = ERRORS.get(refusal.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": text}}


def _message(reply: Reply, model: str, written: int) -> Json:
    usage = {"input_tokens": reply.prompt_tokens, "output_tokens": written}
    usage |= {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    name = f"msg_{secrets.token_hex(12)}"
    message: Json = {"id": name, "type": "message", "role": "assistant", "model": model, "content": []}
    return message | {"stop_reason": None, "stop_sequence": None, "usage": usage}


def _blocks(reply: Reply, ask: Ask) -> list[Json]:
    """Return the content. Clients may not send back empty text."""
    thinking, text = reply.parts(ask.thinking)
    blocks: list[Json] = []
    if thinking:
        blocks.append({"type": "thinking", "thinking": thinking, "signature": UNSIGNED})
    if text is not None:
        blocks.append({"type": "text", "text": text})
    for call, name, arguments in reply.calls:
        blocks.append({"type": "tool_use", "id": call, "name": name, "input": json.loads(arguments)})
    return blocks


def _parts(block: Json) -> tuple[Json, list[Json]]:
    """Return the block as it starts, and the deltas that complete it."""
    empty = EMPTY[block["type"]]
    deltas: list[Json] = [{"type": f"{name}_delta", name: block[name]} for name in empty]
    if block["type"] == "tool_use":
        written = json.dumps(block["input"], ensure_ascii=False)
        deltas = [{"type": "input_json_delta", "partial_json": written}]
    return block | empty, deltas


def _stop(reply: Reply) -> Json:
    if reply.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if reply.calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    reason = "end_turn" if reply.stop_reason is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": reply.stop_reason}
