"""The server of a process: a thread with an event loop of its own, listening on one network interface.

Its web application: POST /NAME/v1/.. for the paths of APIS, GET /NAME/v1/models and /NAME/v1/models/MODEL,
HEAD /NAME. NAME is that of an episode, whose token every request must have. The token is checked before a
body is read. All errors are JSON in the form of the API.
"""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from megatron_stppo.agents.endpoint.session import DEFAULT, ENDED, EndpointLimits, Session
from megatron_stppo.agents.protocols import anthropic_messages as messages
from megatron_stppo.agents.protocols import body
from megatron_stppo.agents.protocols import openai_chat as chat
from megatron_stppo.agents.protocols import openai_responses as responses
from megatron_stppo.agents.protocols.body import Refusal
from megatron_stppo.agents.protocols.exchange import Ask, Json, Reply
from megatron_stppo.environments.choose import listen_for_agents

LOOPBACK = "127.0.0.1"
MAX_HEAD = 2**14  # bytes of the head of a request
START_SECONDS = 30.0
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


class Endpoint:
    """The server of the agents of this process. Example: start(), then open() for every episode."""

    def __init__(
        self,
        model: str,
        max_context: int,
        has_parser: bool,
        limits: EndpointLimits = DEFAULT,
        address: str = LOOPBACK,
    ) -> None:
        """model: the name that clients get. address: where it listens, see choose.listen_for_agents."""
        self.model, self.limits = model, limits
        self.max_context, self.has_parser = max_context, has_parser
        self.sessions: dict[str, Session] = {}  # the open episodes by name
        self._socket = listen_for_agents(address)
        # Connections inherit TCP_NODELAY from this socket. asyncio sets it only for sockets that were created
        # with a protocol number, which this one was not. Without it the body of a reply waits for the
        # acknowledgement of its head, up to 40 ms.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.host, self.port = self._socket.getsockname()[:2]
        config = uvicorn.Config(
            application(self),
            http=_connection(limits.head_seconds),
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=limits.connections,
            timeout_keep_alive=int(limits.idle_seconds),
            h11_max_incomplete_event_size=MAX_HEAD,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="endpoint", daemon=True)

    def start(self) -> Self:
        self._thread.start()
        deadline = time.monotonic() + START_SECONDS
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise RuntimeError("the endpoint for agents did not start")
            time.sleep(0.005)
        return self

    def open(self) -> Session:
        """Return a new session, whose requests are accepted. Call it in the event loop of the episode."""
        session = Session(self.limits)
        self.sessions[session.name] = session
        return session

    def url(self, session: Session) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host  # IPv6
        return f"http://{host}:{self.port}/{session.name}/v1"

    def shut(self, session: Session) -> None:
        """Close the session of an episode: its token is not valid any more."""
        self.sessions.pop(session.name, None)
        session.close()

    def close(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(START_SECONDS)
        self._socket.close()

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._socket]))


def application(endpoint: Endpoint) -> Starlette:
    """Return the web application for the episodes of an endpoint."""

    async def models(request: Request) -> Response:
        session = _session(endpoint, request)
        with session.admitted():
            pass
        name = request.path_params.get("model")  # every name is taken, as in requests
        card = {"id": name or endpoint.model, "object": "model", "created": 0, "owned_by": "megatron_stppo"}
        card |= {"max_model_len": endpoint.max_context}
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
                Route(f"/{{name}}/v1{path}", partial(_answered, endpoint, api), methods=["POST"])
                for path, api in APIS.items()
            ),
            Route("/{name}/v1/models", models, methods=["GET"]),
            Route("/{name}/v1/models/{model:path}", models, methods=["GET"]),
            Route("/{name}", reached, methods=["HEAD"]),
        ],
        exception_handlers={Refusal: refused, HTTPException: unknown, Exception: failed},
    )


def _session(endpoint: Endpoint, request: Request) -> Session:
    """Return the episode of a request. Raises Refusal unless the request has its token.

    Clients of Anthropic's API may send it as x-api-key.
    """
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    tokens = [request.headers.get("x-api-key", ""), *([token] if scheme.lower() == "bearer" else [])]
    session = endpoint.sessions.get(request.path_params["name"])
    if session is None or not any([session.opens(token) for token in tokens]):
        raise Refusal(401, UNKNOWN, "invalid_api_key")
    return session


async def _answered(endpoint: Endpoint, api: Api, request: Request) -> Response:
    session = _session(endpoint, request)
    with session.admitted():
        try:
            content = body.read(await _content(request, endpoint.limits.body_seconds), api.max_items)
            ask = api.ask(content, endpoint.has_parser)
        except Refusal as refusal:
            session.refuse(refusal)
            raise
        ask.is_retry = request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
        request.state.connection.unread = ask  # see _connection
        await asyncio.sleep(0)  # connections that this client has closed before are closed here too
        session.submit(ask)
        answer = await _reply(ask, request)
    if isinstance(answer, Refusal):
        raise answer
    if isinstance(answer, int):
        return JSONResponse({"input_tokens": answer})
    if ask.stream:
        return StreamingResponse(api.events(answer, endpoint.model, ask), media_type="text/event-stream")
    return JSONResponse(api.whole(answer, endpoint.model, ask))


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


def _connection(seconds: float) -> type[H11Protocol]:
    """Return uvicorn's protocol with what it lacks: a deadline for the head of a request, and unread answers.

    A client that gives up closes its connection. If it has not taken all bytes of the answer by then, the
    kernel resets the connection, or refuses bytes that are written later. If it has taken them, the
    connection ends without an error.
    """

    class Watched(H11Protocol):
        unread: Ask | None = None  # the last ask, abandoned if the client leaves without reading the answer
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.app_state = {**self.app_state, "connection": self}
            self._watch()

        def data_received(self, data: bytes) -> None:
            if self._awaits_head:
                self.unread = None  # a client reads an answer before it sends the next request
                self._watch()
            super().data_received(data)
            if not self._awaits_head:
                self._unwatch()

        def eof_received(self) -> None:
            error = self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error or not self._awaits_head or self.transport.get_write_buffer_size():
                self._abandon()

        def connection_lost(self, exc: Exception | None) -> None:
            self._unwatch()
            if exc is not None:
                self._abandon()
            super().connection_lost(exc)

        def _abandon(self) -> None:
            if self.unread is not None:
                self.unread.abandoned = True

        @property
        def _awaits_head(self) -> bool:
            return self.cycle is None or self.cycle.response_complete

        def _watch(self) -> None:
            if self._deadline is None:
                self._deadline = self.loop.call_later(seconds, self.transport.abort)

        def _unwatch(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return Watched
