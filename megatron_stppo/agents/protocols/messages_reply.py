"""A reply in the form of Anthropic's Messages API: an object, or a stream of events; and its errors."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator

from megatron_stppo.agents.protocols.asks import Ask
from megatron_stppo.agents.protocols.body import Refusal
from megatron_stppo.agents.protocols.chat_messages import split_thinking
from megatron_stppo.agents.protocols.reply import Json, Reply

UNSIGNED = "unsigned"  # clients require a signature of thinking
ERRORS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
}


def messages_object(reply: Reply, model: str, ask: Ask) -> Json:
    """Return the reply as one object."""
    usage = _usage(reply) | {"output_tokens": len(reply.token_ids)}
    return _message(model, usage) | {"content": _blocks(reply, ask)} | _stop(reply)


def messages_events(reply: Reply, model: str, ask: Ask) -> Iterator[str]:
    """Yield the reply as server-sent events: for each block its start, its content and its stop."""
    yield _event("message_start", message=_message(model, _usage(reply)))
    for index, block in enumerate(_blocks(reply, ask)):
        empty, deltas = _parts(block)
        yield _event("content_block_start", index=index, content_block=empty)
        for delta in deltas:
            yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    yield _event("message_delta", delta=_stop(reply), usage={"output_tokens": len(reply.token_ids)})
    yield _event("message_stop")


def messages_error(refusal: Refusal) -> Json:
    """Return a refusal as clients of the API read it.

    Claude Code shortens its conversation when an error says that the prompt is too long.
    """
    text = str(refusal)
    if refusal.code == "context_length_exceeded":
        text = f"prompt is too long: {text}"
    kind = ERRORS.get(refusal.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": text}}


def _message(model: str, usage: Json) -> Json:
    name = f"msg_{secrets.token_hex(12)}"
    message: Json = {"id": name, "type": "message", "role": "assistant", "model": model, "content": []}
    return message | {"stop_reason": None, "stop_sequence": None, "usage": usage}


def _blocks(reply: Reply, ask: Ask) -> list[Json]:
    """Return the content. Clients may not send back empty text, so it is left out unless it is alone."""
    thinking, text = split_thinking(reply.text) if ask.thinking else ("", reply.text)
    blocks: list[Json] = []
    if thinking:
        blocks.append({"type": "thinking", "thinking": thinking, "signature": UNSIGNED})
    if text.strip() or not (thinking or reply.calls):
        blocks.append({"type": "text", "text": text})
    for call, name, arguments in reply.calls:
        blocks.append({"type": "tool_use", "id": call, "name": name, "input": json.loads(arguments)})
    return blocks


def _parts(block: Json) -> tuple[Json, list[Json]]:
    """Return the block as it starts, and the deltas that complete it."""
    if block["type"] == "text":
        return block | {"text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "thinking":
        deltas = [
            {"type": "thinking_delta", "thinking": block["thinking"]},
            {"type": "signature_delta", "signature": UNSIGNED},
        ]
        return block | {"thinking": "", "signature": ""}, deltas
    written = json.dumps(block["input"], ensure_ascii=False)
    return block | {"input": {}}, [{"type": "input_json_delta", "partial_json": written}]


def _stop(reply: Reply) -> Json:
    if reply.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if reply.calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    reason = "end_turn" if reply.stop_reason is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": reply.stop_reason}


def _usage(reply: Reply) -> Json:
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": reply.prompt_tokens, "output_tokens": 0} | cached


def _event(kind: str, **data: object) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind} | data)}\n\n"
