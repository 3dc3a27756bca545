"""OpenAI's Responses API: a request is translated into one for a chat; a reply is an object, or events.

Nothing is stored between requests, so each one has the whole conversation in `input`. Ids, statuses and
annotations have no effect. docs/agents.md has the fields for users.
"""

import itertools
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from megatron_stppo.agents.protocols.body import Refusal, fields, objects, texts, unsupported
from megatron_stppo.agents.protocols.exchange import Ask, AssistantTurn, Json, Reply, event, function_call
from megatron_stppo.agents.protocols.openai_chat import tool_choice, translated

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
    choice = tool_choice(given.get("tool_choice"))
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
    turn = AssistantTurn()
    for where, item in objects("input", items):
        kind = item.get("type", "message" if "role" in item else None)
        if kind == "function_call":
            turn.calls.append(_call(where, item))
            continue
        is_said = kind == "message" and item.get("role") == "assistant"
        if turn.text is not None or turn.calls or not (is_said or kind == "reasoning"):
            yield from _ended(turn)
            turn = AssistantTurn()
        if is_said:
            turn.text = texts(f"{where}.content", item.get("content"), ("output_text", "input_text"))
        elif kind == "reasoning":
            turn.thinking.append(_thinking(where, item))
        else:
            yield _read(where, kind, item)
    yield from _ended(turn)


def _ended(turn: AssistantTurn) -> list[dict[str, Any]]:
    """Return the message of a turn: thinking, then a text, then calls; none if it has no part."""
    return [turn.message()] if turn.text is not None or turn.calls or any(turn.thinking) else []


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
    return function_call(item.get("call_id", ""), flat, arguments)


def _tools(listed: Iterable[tuple[str, dict[str, Any]]]) -> Iterator[tuple[dict[str, Any], str | None]]:
    """Yield the tools of a chat with their namespaces. Codex sends those of an MCP server as a namespace."""
    for where, tool in listed:
        if tool.get("type") != "namespace":
            yield _tool(where, tool), None
            continue
        for inside, function in objects(f"{where}.tools", tool.get("tools")):
            space, named = tool.get("name"), _tool(inside, function)
            named["function"]["name"] = _flat(inside, space, function.get("name"))
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


def responses_object(reply: Reply, model: str, ask: Ask) -> Json:
    """Return the reply as one object."""
    return _response(model) | _end(reply, _items(reply, ask))


def responses_events(reply: Reply, model: str, ask: Ask) -> Iterator[str]:
    """Yield the reply as server-sent events: for each item its start, its parts and its end."""
    begun, items, numbers = _response(model), _items(reply, ask), itertools.count()

    def numbered(kind: str, **data: object) -> str:
        return event(f"response.{kind}", sequence_number=next(numbers), **data)

    yield numbered("created", response=begun)
    yield numbered("in_progress", response=begun)
    for index, item in enumerate(items):
        empty = "arguments" if item["type"] == "function_call" else "content"
        started = item | {"status": "in_progress", empty: type(item[empty])()}
        yield numbered("output_item.added", output_index=index, item=started)
        where: Json = {"item_id": item["id"], "output_index": index}
        if item["type"] == "function_call":
            yield numbered("function_call_arguments.delta", **where, delta=item["arguments"])
            said = {"name": item["name"], "arguments": item["arguments"]}
            yield numbered("function_call_arguments.done", **where, **said)
        else:
            (part,) = item["content"]
            kind, where = part["type"], where | {"content_index": 0}
            logprobs: Json = {"logprobs": []} if kind == "output_text" else {}
            yield numbered("content_part.added", **where, part=part | {"text": ""})
            yield numbered(f"{kind}.delta", **where, **logprobs, delta=part["text"])
            yield numbered(f"{kind}.done", **where, **logprobs, text=part["text"])
            yield numbered("content_part.done", **where, part=part)
        yield numbered("output_item.done", output_index=index, item=item)
    whole = begun | _end(reply, items)
    yield numbered(whole["status"], response=whole)


def _response(model: str) -> Json:
    name = f"resp_{secrets.token_hex(16)}"
    fixed: Json = {"error": None, "incomplete_details": None, "instructions": None, "metadata": {}}
    tools: Json = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True}
    begun: Json = {"id": name, "object": "response", "created_at": int(time.time()), "status": "in_progress"}
    sampling: Json = {"temperature": None, "top_p": None}  # the run's
    return begun | {"model": model, "output": [], "usage": None} | fixed | tools | sampling


def _end(reply: Reply, items: list[Json]) -> Json:
    prompt, completion = reply.prompt_tokens, len(reply.token_ids)
    usage = {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + completion,
    }
    cut: Json = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    end = cut if reply.finish_reason == "length" else {"status": "completed"}
    return end | {"output": items, "usage": usage}


def _items(reply: Reply, ask: Ask) -> list[Json]:
    """Return thinking, text and calls as items."""
    thinking, text = reply.parts(ask.thinking)
    status = "incomplete" if reply.finish_reason == "length" else "completed"
    items: list[Json] = []
    if thinking:
        content = [{"type": "reasoning_text", "text": thinking}]
        sealed = {"encrypted_content": SEAL + thinking} if ask.sealed else {}
        items.append(_item("rs", "reasoning", status) | {"summary": [], "content": content} | sealed)
    if text is not None:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        items.append(_item("msg", "message", status) | {"role": "assistant", "content": [part]})
    for call, name, arguments in reply.calls:
        said = {"call_id": call, "name": name, "arguments": arguments}
        if (space := ask.namespaces.get(name)) is not None:
            said |= {"namespace": space, "name": name.removeprefix(f"{space}{BETWEEN}")}
        items.append(_item("fc", "function_call", status) | said)
    return items


def _item(prefix: str, kind: str, status: str) -> Json:
    return {"id": f"{prefix}_{secrets.token_hex(12)}", "type": kind, "status": status}
