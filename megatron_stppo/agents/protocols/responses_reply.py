"""A reply in the form of OpenAI's Responses API: an object, or a stream of events."""

from __future__ import annotations

import itertools
import json
import secrets
import time
from collections.abc import Iterator

from megatron_stppo.agents.protocols.asks import Ask
from megatron_stppo.agents.protocols.chat_messages import split_thinking
from megatron_stppo.agents.protocols.reply import Json, Reply
from megatron_stppo.agents.protocols.responses_request import BETWEEN, SEAL


def responses_object(reply: Reply, model: str, ask: Ask) -> Json:
    """Return the reply as one object."""
    return _response(model) | _ended(reply, _items(reply, ask))


def responses_events(reply: Reply, model: str, ask: Ask) -> Iterator[str]:
    """Yield the reply as server-sent events: for each item its start, its parts and its end."""
    begun, items, numbers = _response(model), _items(reply, ask), itertools.count()

    def event(kind: str, **data: object) -> str:
        content = {"type": f"response.{kind}", "sequence_number": next(numbers)} | data
        return f"event: response.{kind}\ndata: {json.dumps(content)}\n\n"

    yield event("created", response=begun)
    yield event("in_progress", response=begun)
    for index, item in enumerate(items):
        empty = "arguments" if item["type"] == "function_call" else "content"
        started = item | {"status": "in_progress", empty: type(item[empty])()}
        yield event("output_item.added", output_index=index, item=started)
        where: Json = {"item_id": item["id"], "output_index": index}
        if item["type"] == "function_call":
            yield event("function_call_arguments.delta", **where, delta=item["arguments"])
            said = {"name": item["name"], "arguments": item["arguments"]}
            yield event("function_call_arguments.done", **where, **said)
        else:
            (part,) = item["content"]
            kind, where = part["type"], where | {"content_index": 0}
            logprobs: Json = {"logprobs": []} if kind == "output_text" else {}
            yield event("content_part.added", **where, part=part | {"text": ""})
            yield event(f"{kind}.delta", **where, **logprobs, delta=part["text"])
            yield event(f"{kind}.done", **where, **logprobs, text=part["text"])
            yield event("content_part.done", **where, part=part)
        yield event("output_item.done", output_index=index, item=item)
    whole = begun | _ended(reply, items)
    yield event(whole["status"], response=whole)


def _response(model: str) -> Json:
    name = f"resp_{secrets.token_hex(16)}"
    fixed: Json = {"error": None, "incomplete_details": None, "instructions": None, "metadata": {}}
    tools: Json = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True}
    begun: Json = {"id": name, "object": "response", "created_at": int(time.time()), "status": "in_progress"}
    sampling: Json = {"temperature": None, "top_p": None}  # the run's
    return begun | {"model": model, "output": [], "usage": None} | fixed | tools | sampling


def _ended(reply: Reply, items: list[Json]) -> Json:
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
    """Return thinking, text and calls as items. Text is left out if it is empty and not alone."""
    thinking, text = split_thinking(reply.text) if ask.thinking else ("", reply.text)
    status = "incomplete" if reply.finish_reason == "length" else "completed"
    items: list[Json] = []
    if thinking:
        content = [{"type": "reasoning_text", "text": thinking}]
        sealed = {"encrypted_content": SEAL + thinking} if ask.sealed else {}
        items.append(_item("rs", "reasoning", status) | {"summary": [], "content": content} | sealed)
    if text.strip() or not (thinking or reply.calls):
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
