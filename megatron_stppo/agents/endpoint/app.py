"""The web application: POST /NAME/v1/chat/completions, POST /NAME/v1/completions, GET /NAME/v1/models.

NAME is that of an episode, whose token every request must have. The token is checked before a body is read.
All errors are JSON in the form of the API.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from megatron_stppo.agents.endpoint.session import ENDED, Session
from megatron_stppo.agents.protocols import body
from megatron_stppo.agents.protocols.asks import Ask, chat_ask, text_ask
from megatron_stppo.agents.protocols.body import Refusal
from megatron_stppo.agents.protocols.reply import (
    Json,
    Reply,
    chat_chunks,
    chat_object,
    text_chunks,
    text_object,
)

log = logging.getLogger(__name__)
# The same answer for an unknown name, a name of another episode and a wrong token.
UNKNOWN = "wrong API key, or no such episode"
PATHS = {"/chat/completions": "POST", "/completions": "POST", "/models": "GET"}
ANSWERS = ", ".join(f"{method} BASE_URL{path}" for path, method in PATHS.items())


@dataclass(frozen=True)
class Doors:
    """The open episodes, and the settings that all of them share. sessions: the open episodes by name."""

    sessions: Mapping[str, Session]
    model: str
    max_context: int
    has_parser: bool
    body_seconds: float = 30.0  # from the head of a request to the end of its body


def application(doors: Doors) -> Starlette:
    """Return the web application for the episodes of `doors`."""

    async def chat(request: Request) -> Response:
        def ask(content: bytes) -> Ask:
            return chat_ask(body.read(content), doors.has_parser)

        return await _answered(doors, request, ask)

    async def completions(request: Request) -> Response:
        def ask(content: bytes) -> Ask:
            return text_ask(body.read(content, body.MAX_BYTES))

        return await _answered(doors, request, ask)

    async def models(request: Request) -> Response:
        session = _session(doors, request)
        session.admit()
        session.leave()
        card = {"id": doors.model, "object": "model", "created": 0, "owned_by": "megatron_stppo"}
        return JSONResponse({"object": "list", "data": [card | {"max_model_len": doors.max_context}]})

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, Refusal)
        return _refusal(error)

    async def unknown(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = "method_not_allowed" if error.status_code == 405 else "not_found"
        text = f"this endpoint has only {ANSWERS}; not {request.method} {request.url.path}"
        return _refusal(Refusal(error.status_code, text, code))

    async def failed(request: Request, error: Exception) -> Response:
        return _refusal(Refusal(500, f"the endpoint failed: {type(error).__name__}", "server_error"))

    serving = {"/chat/completions": chat, "/completions": completions, "/models": models}
    # not FastAPI, which would look for parameters in every request
    return Starlette(
        routes=[
            Route(f"/{{name}}/v1{path}", serving[path], methods=[method]) for path, method in PATHS.items()
        ],
        exception_handlers={Refusal: refused, HTTPException: unknown, Exception: failed},
    )


def _session(doors: Doors, request: Request) -> Session:
    """Return the episode of a request. Raises Refusal unless the request has its token."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    session = doors.sessions.get(request.path_params["name"])
    if session is None or not session.opens(token) or scheme.lower() != "bearer":
        raise Refusal(401, UNKNOWN, "invalid_api_key")
    return session


async def _answered(doors: Doors, request: Request, make: Callable[[bytes], Ask]) -> Response:
    session = _session(doors, request)
    session.admit()
    try:
        try:
            ask = make(await _content(request, doors.body_seconds))
        except Refusal as refusal:
            session.refused = str(refusal)
            raise
        ask.is_retry = request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
        request.state.connection.unread = ask  # see server.py
        await asyncio.sleep(0)  # connections that this client has closed before are closed here too
        session.submit(ask)
        answer = await _reply(ask, request)
    finally:
        session.leave()
    if isinstance(answer, Refusal):
        raise answer
    if ask.stream:
        chunks = (chat_chunks if ask.chat else text_chunks)(answer, doors.model, ask.usage_in_stream)
        return StreamingResponse(_events(chunks), media_type="text/event-stream")
    return JSONResponse((chat_object if ask.chat else text_object)(answer, doors.model))


async def _content(request: Request, seconds: float) -> bytes:
    """Return the body. Raises Refusal if it is too large or arrives too slowly."""
    content = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                content += part
                if len(content) > body.MAX_BYTES:
                    raise body.too_large()
    except TimeoutError:
        raise Refusal(408, f"the body did not arrive within {seconds:g} s") from None
    except ClientDisconnect:
        raise Refusal(400, "the connection was closed inside the body") from None
    return bytes(content)


async def _reply(ask: Ask, request: Request) -> Reply | Refusal:
    """Wait for the reply, or until the client leaves; the connection then marks the ask as abandoned."""
    reply = asyncio.wrap_future(ask.reply)
    left = asyncio.create_task(_left(request))
    both: set[asyncio.Future[Any]] = {reply, left}
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if reply.done():
            return reply.result()
        return Refusal(499, "the client has closed the connection")
    except asyncio.CancelledError:
        ask.abandoned = True
        return Refusal(410, ENDED)
    finally:
        left.cancel()


async def _left(request: Request) -> None:
    """Return when the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _events(chunks: Iterator[Json]) -> Iterator[str]:
    for chunk in chunks:
        yield f"data: {json.dumps(chunk)}\n\n"
    yield "data: [DONE]\n\n"


def _refusal(error: Refusal) -> Response:
    info = {"message": str(error), "type": error.code, "param": None, "code": error.status}
    # a body may be unread
    close = {"connection": "close"} if error.status in (401, 404, 405, 408, 413, 429, 500) else {}
    return JSONResponse({"error": info}, error.status, headers=close)
