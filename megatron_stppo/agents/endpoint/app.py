"""The web application: POST /NAME/v1/.. for the paths of APIS, GET /NAME/v1/models and /NAME/v1/models/MODEL,
HEAD /NAME.

NAME is that of an episode, whose token every request must have. The token is checked before a body is read.
All errors are JSON in the form of the API.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from megatron_stppo.agents.endpoint.session import ENDED, Session
from megatron_stppo.agents.protocols import anthropic_messages as messages
from megatron_stppo.agents.protocols import body
from megatron_stppo.agents.protocols import openai_chat as chat
from megatron_stppo.agents.protocols import openai_responses as responses
from megatron_stppo.agents.protocols.body import Refusal
from megatron_stppo.agents.protocols.exchange import Ask, Json, Reply

# The same answer for an unknown name, a name of another episode and a wrong token.
UNKNOWN = "wrong API key, or no such episode"


@dataclass(frozen=True)
class Api:
    """What an API makes of a body, and in which form it answers."""

    ask: Callable[[Json, bool], Ask]  # the bool: whether the run can parse calls of tools; raises Refusal
    whole: Callable[[Reply, str, Ask], Json]
    events: Callable[[Reply, str, Ask], Iterator[str]]  # server-sent
    max_items: int = body.MAX_ITEMS  # of a body


APIS = {  # by path below the base URL
    "/chat/completions": Api(chat.chat_ask, chat.chat_object, chat.chat_events),
    "/completions": Api(chat.text_ask, chat.text_object, chat.text_events, body.MAX_BYTES),
    "/messages": Api(messages.messages_ask, messages.messages_object, messages.messages_events),
    "/messages/count_tokens": Api(
        partial(messages.messages_ask, counts=True), messages.messages_object, messages.messages_events
    ),
    "/responses": Api(responses.responses_ask, responses.responses_object, responses.responses_events),
}
PATHS = f"GET BASE_URL/models, POST BASE_URL + {', '.join(APIS)}"


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

    async def models(request: Request) -> Response:
        session = _session(doors, request)
        with session.admitted():
            pass
        name = request.path_params.get("model")  # every name is taken, as in requests
        card = {"id": name or doors.model, "object": "model", "created": 0, "owned_by": "megatron_stppo"}
        card |= {"max_model_len": doors.max_context}
        return JSONResponse({"object": "list", "data": [card]} if name is None else card)

    async def reached(request: Request) -> Response:
        """Answer clients that ask only whether there is a server, without a key."""
        return Response()

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, Refusal)
        return _refusal(error, request)

    async def unknown(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = "method_not_allowed" if error.status_code == 405 else "not_found"
        text = f"there is only {PATHS}; not {request.method} {request.url.path}"
        if "/v1/v1/" in request.url.path:
            text = f"use the base URL without /v1; {text}"
        return _refusal(Refusal(error.status_code, text, code), request)

    async def failed(request: Request, error: Exception) -> Response:
        return _refusal(Refusal(500, f"the endpoint failed: {type(error).__name__}", "server_error"), request)

    # not FastAPI, which would look for parameters in every request
    return Starlette(
        routes=[
            *(
                Route(f"/{{name}}/v1{path}", partial(_answered, doors, api), methods=["POST"])
                for path, api in APIS.items()
            ),
            Route("/{name}/v1/models", models, methods=["GET"]),
            Route("/{name}/v1/models/{model:path}", models, methods=["GET"]),
            Route("/{name}", reached, methods=["HEAD"]),
        ],
        exception_handlers={Refusal: refused, HTTPException: unknown, Exception: failed},
    )


def _session(doors: Doors, request: Request) -> Session:
    """Return the episode of a request. Raises Refusal unless the request has its token.

    Clients of Anthropic's API may send it as x-api-key.
    """
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    tokens = [request.headers.get("x-api-key", ""), *([token] if scheme.lower() == "bearer" else [])]
    session = doors.sessions.get(request.path_params["name"])
    if session is None or not any([session.opens(token) for token in tokens]):
        raise Refusal(401, UNKNOWN, "invalid_api_key")
    return session


async def _answered(doors: Doors, api: Api, request: Request) -> Response:
    session = _session(doors, request)
    with session.admitted():
        try:
            content = body.read(await _content(request, doors.body_seconds), api.max_items)
            ask = api.ask(content, doors.has_parser)
        except Refusal as refusal:
            session.refuse(refusal)
            raise
        ask.is_retry = request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
        request.state.connection.unread = ask  # see server.py
        await asyncio.sleep(0)  # connections that this client has closed before are closed here too
        session.submit(ask)
        answer = await _reply(ask, request)
    if isinstance(answer, Refusal):
        raise answer
    if isinstance(answer, int):
        return JSONResponse({"input_tokens": answer})
    if ask.stream:
        return StreamingResponse(api.events(answer, doors.model, ask), media_type="text/event-stream")
    return JSONResponse(api.whole(answer, doors.model, ask))


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


async def _reply(ask: Ask, request: Request) -> Reply | int | Refusal:
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


def _refusal(error: Refusal, request: Request) -> Response:
    """Return the answer to a refused request, in the form of the API to which its path belongs."""
    info = {"message": str(error), "type": error.code, "param": None, "code": error.status}
    content = messages.messages_error(error) if "/messages" in request.url.path else {"error": info}
    # a body may be unread
    close = {"connection": "close"} if error.status in (401, 404, 405, 408, 413, 429, 500) else {}
    return JSONResponse(content, error.status, headers=close)
