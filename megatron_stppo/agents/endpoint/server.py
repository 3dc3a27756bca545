"""The server of a process: a thread with an event loop of its own, listening on one network interface."""

import asyncio
import socket
import threading
import time
from typing import Any, Self

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from megatron_stppo.agents.endpoint.app import Doors, application
from megatron_stppo.agents.endpoint.session import DEFAULT, EndpointLimits, Session
from megatron_stppo.agents.protocols.exchange import Ask
from megatron_stppo.environments.choose import listen_for_agents

LOOPBACK = "127.0.0.1"
MAX_HEAD = 2**14  # bytes of the head of a request
START_SECONDS = 30.0


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
        self.model, self._limits = model, limits
        self._sessions: dict[str, Session] = {}
        doors = Doors(self._sessions, model, max_context, has_parser, limits.body_seconds)
        self._socket = listen_for_agents(address)
        # Connections inherit TCP_NODELAY from this socket. asyncio sets it only for sockets that were created
        # with a protocol number, which this one was not. Without it the body of a reply waits for the
        # acknowledgement of its head, up to 40 ms.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.host, self.port = self._socket.getsockname()[:2]
        config = uvicorn.Config(
            application(doors),
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
        session = Session(self._limits)
        self._sessions[session.name] = session
        return session

    def url(self, session: Session) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host  # IPv6
        return f"http://{host}:{self.port}/{session.name}/v1"

    def shut(self, session: Session) -> None:
        """Close the session of an episode: its token is not valid any more."""
        self._sessions.pop(session.name, None)
        session.close()

    def close(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(START_SECONDS)
        self._socket.close()

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._socket]))


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
