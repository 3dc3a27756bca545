"""The completion that a client gets, and its forms: an object, or a stream of chunks.

The engine returns whole turns. A stream therefore begins when the turn is complete. The objects are those of
OpenAI's API, with vLLM's additions stop_reason, token_ids and prompt_token_ids.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """A completion, as text and as tokens.

    Example: Reply("Hi", (), "stop", None, 2, (1, 2), (5, 9), ("Hi", ""), (-0.1, -2.0)).
    """

    text: str  # without the calls of tools, and without the stop string unless the client asked for it
    calls: tuple[tuple[str, str, str], ...]  # (id, name of the function, arguments as JSON)
    finish_reason: str
    stop_reason: str | None  # the stop string
    prompt_tokens: int
    prompt_ids: tuple[int, ...]  # at least one if the client asked for token ids, else none
    token_ids: tuple[int, ...]
    pieces: tuple[str, ...]  # the text of each token if the client asked for log-probs, else none
    logprobs: tuple[float, ...]


def chat_object(reply: Reply, model: str) -> Json:
    """Return the answer to a chat request as one object."""
    # OpenAI's content of a message that only calls tools is null
    content = reply.text if reply.text or not reply.calls else None
    message = {"role": "assistant", "content": content, "tool_calls": _calls(reply)}
    choice = {"index": 0, "message": message} | _end(reply) | _tokens(reply, _chat_logprobs(reply))
    return _object("chat.completion", model, choice) | _prompt(reply) | _usage(reply)


def chat_chunks(reply: Reply, model: str, usage: bool) -> Iterator[Json]:
    """Yield the answer to a chat request as a stream of chunks. usage: whether the last one is the usage."""
    deltas: list[Json] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": reply.text}] if reply.text else []
    deltas += [{"tool_calls": [{"index": index} | call]} for index, call in enumerate(_calls(reply))]
    choices: list[Json] = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices[min(1, len(deltas) - 1)] |= _tokens(reply, _chat_logprobs(reply))
    choices.append({"index": 0, "delta": {}} | _end(reply))
    chunk = _object("chat.completion.chunk", model)
    for number, choice in enumerate(choices):
        yield chunk | {"choices": [choice]} | (_prompt(reply) if number == 0 else {})
    if usage:
        yield chunk | _usage(reply)


def text_object(reply: Reply, model: str) -> Json:
    """Return the answer to a text request as one object."""
    choice = {"index": 0, "text": reply.text} | _end(reply) | _tokens(reply, _text_logprobs(reply))
    return _object("text_completion", model, choice | _prompt(reply)) | _usage(reply)


def text_chunks(reply: Reply, model: str, usage: bool) -> Iterator[Json]:
    """Yield the answer to a text request as a stream of chunks."""
    whole = text_object(reply, model)
    yield whole | {"usage": None}
    if usage:
        yield whole | {"choices": []}


def _object(kind: str, model: str, *choices: Json) -> Json:
    name, created = f"cmpl-{secrets.token_hex(16)}", int(time.time())
    return {"id": name, "object": kind, "created": created, "model": model, "choices": list(choices)}


def _usage(reply: Reply) -> Json:
    prompt, completion = reply.prompt_tokens, len(reply.token_ids)
    total = prompt + completion
    return {"usage": {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}}


def _calls(reply: Reply) -> list[Json]:
    return [
        {"id": call, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call, name, arguments in reply.calls
    ]


def _end(reply: Reply) -> Json:
    return {"finish_reason": reply.finish_reason, "stop_reason": reply.stop_reason}


def _prompt(reply: Reply) -> Json:
    return {"prompt_token_ids": reply.prompt_ids or None}


def _tokens(reply: Reply, logprobs: Json | None) -> Json:
    return {"logprobs": logprobs, "token_ids": reply.token_ids if reply.prompt_ids else None}


def _chat_logprobs(reply: Reply) -> Json | None:
    if not reply.pieces:
        return None
    return {
        "content": [
            {"token": piece, "logprob": logprob, "bytes": list(piece.encode()), "top_logprobs": []}
            for piece, logprob in zip(reply.pieces, reply.logprobs, strict=True)
        ]
    }


def _text_logprobs(reply: Reply) -> Json | None:
    if not reply.pieces:
        return None
    lengths = [len(piece) for piece in reply.pieces]
    return {
        "text_offset": list(itertools.accumulate(lengths, initial=0))[:-1],
        "token_logprobs": reply.logprobs,
        "tokens": reply.pieces,
        "top_logprobs": [{piece: n} for piece, n in zip(reply.pieces, reply.logprobs, strict=True)],
    }
