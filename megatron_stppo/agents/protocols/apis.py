"""The APIs of the endpoint: what each makes of a body, and in which form it answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron_stppo.agents.protocols import body
from megatron_stppo.agents.protocols.asks import Ask, chat_ask, text_ask
from megatron_stppo.agents.protocols.body import Refusal
from megatron_stppo.agents.protocols.messages_reply import messages_error, messages_events, messages_object
from megatron_stppo.agents.protocols.messages_request import messages_ask
from megatron_stppo.agents.protocols.reply import (
    Json,
    Reply,
    chat_chunks,
    chat_object,
    text_chunks,
    text_object,
)
from megatron_stppo.agents.protocols.responses_reply import responses_events, responses_object
from megatron_stppo.agents.protocols.responses_request import responses_ask


@dataclass(frozen=True)
class Api:
    """One API. ask: the body and whether the run can parse calls of tools -> Ask; raises Refusal."""

    ask: Callable[[bytes, bool], Ask]
    whole: Callable[[Reply, str, Ask], Json]
    events: Callable[[Reply, str, Ask], Iterator[str]]  # server-sent


def error_object(refusal: Refusal, path: str) -> Json:
    """Return a refusal in the form of the API to which the path of the request belongs."""
    if "/messages" in path:
        return messages_error(refusal)
    info = {"message": str(refusal), "type": refusal.code, "param": None, "code": refusal.status}
    return {"error": info}


def _data(chunks: Iterator[Json]) -> Iterator[str]:
    for chunk in chunks:
        yield f"data: {json.dumps(chunk)}\n\n"
    yield "data: [DONE]\n\n"


# by path below the base URL
APIS = {
    "/chat/completions": Api(
        lambda content, parser: chat_ask(body.read(content), parser),
        lambda reply, model, ask: chat_object(reply, model),
        lambda reply, model, ask: _data(chat_chunks(reply, model, ask.usage_in_stream)),
    ),
    "/completions": Api(
        lambda content, parser: text_ask(body.read(content, body.MAX_BYTES)),
        lambda reply, model, ask: text_object(reply, model),
        lambda reply, model, ask: _data(text_chunks(reply, model, ask.usage_in_stream)),
    ),
    "/messages": Api(
        lambda content, parser: messages_ask(body.read(content), parser), messages_object, messages_events
    ),
    "/messages/count_tokens": Api(
        lambda content, parser: messages_ask(body.read(content), parser, counts=True),
        messages_object,
        messages_events,
    ),
    "/responses": Api(
        lambda content, parser: responses_ask(body.read(content), parser), responses_object, responses_events
    ),
}
