"""One episode at the endpoint: the limits of its clients, and the queue of their requests.

The server's thread calls `admitted` and `submit`; everything else belongs to the episode's event loop.
"""

import asyncio
import hmac
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from megatron_stppo.agents.protocols.body import Refusal
from megatron_stppo.agents.protocols.exchange import Ask

ENDED = "the episode has ended"
KINDS = 8  # of refusals that are noted


@dataclass(frozen=True)
class EndpointLimits:
    """Limits against slow and numerous clients, and on what one episode may ask for.

    Example: EndpointLimits(head_seconds=1.0) closes a connection on which a request begins and whose head is
    not complete after one second.
    """

    connections: int = 2048  # at a time; others get 503
    head_seconds: float = 10.0  # from the first byte of a request, or a new connection, to the head's end
    body_seconds: float = 30.0
    idle_seconds: float = 60.0  # a connection without a request
    waiting: int = 64  # requests of an episode at a time
    requests: int = 10_000  # of an episode, refused ones included
    per_second: float = 200.0  # requests of an episode; also the size of a burst


DEFAULT = EndpointLimits()


@dataclass
class Session:
    """One episode at the endpoint. Its name is part of its address; every request must have its token."""

    limits: EndpointLimits = DEFAULT
    name: str = field(default_factory=lambda: secrets.token_hex(8))
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32))

    def __post_init__(self) -> None:
        """Must be called in the event loop of the episode."""
        self._loop = asyncio.get_running_loop()
        self._asks: asyncio.Queue[Ask | None] = asyncio.Queue()  # None: the agent has ended
        self._closed = False
        self.asked = 0  # requests for a completion, whether their clients wait for it or not
        self.refused = ""  # why the last request that was refused was refused
        self.refusals: dict[str, str] = {}  # the same of status 400, by its kind: the text without numbers
        self._waiting = self._requests = 0
        self._allowed, self._since = self.limits.per_second, time.monotonic()

    def opens(self, token: str) -> bool:
        """Return whether this is the token. Takes the same time for every token of a length."""
        return hmac.compare_digest(token.encode("utf-8", "replace"), self.token.encode())

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Context manager that counts a request. Raises Refusal above a limit."""
        now = time.monotonic()
        self._allowed += (now - self._since) * self.limits.per_second
        self._allowed, self._since = min(self._allowed, self.limits.per_second), now
        self._requests += 1
        if self._requests > self.limits.requests:
            raise Refusal(429, f"more than {self.limits.requests} requests in an episode", "rate_limit")
        if self._waiting >= self.limits.waiting:
            raise Refusal(429, f"more than {self.limits.waiting} requests at a time", "rate_limit")
        if self._allowed < 1:
            raise Refusal(429, f"more than {self.limits.per_second:g} requests per second", "rate_limit")
        self._allowed -= 1
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    def refuse(self, refusal: Refusal) -> None:
        """Note why a request is refused. Any thread may call it."""
        self.refused = str(refusal)
        if refusal.status == 400 and len(self.refusals) < KINDS:
            self.refusals.setdefault(re.sub(r"\d+", "", self.refused), self.refused)

    def submit(self, ask: Ask) -> None:
        """Send a request to the episode. Raises Refusal if its event loop has ended."""
        self.asked += not ask.counts
        try:
            self._loop.call_soon_threadsafe(self._take, ask)
        except RuntimeError:
            raise Refusal(410, ENDED) from None

    async def next(self) -> Ask | None:
        """Return the next request whose client still waits; None if the agent has ended."""
        while (ask := await self._asks.get()) is not None and ask.abandoned:
            pass
        return ask

    def end(self, agent: object) -> None:
        """Let `next` return None, because the agent has ended."""
        self._asks.put_nowait(None)

    def close(self) -> None:
        """Refuse the requests that wait, and all later ones."""
        self._closed = True
        while not self._asks.empty():
            if (ask := self._asks.get_nowait()) is not None:
                ask.reply.set_result(Refusal(410, ENDED))

    def _take(self, ask: Ask) -> None:
        if self._closed:
            ask.reply.set_result(Refusal(410, ENDED))
        else:
            self._asks.put_nowait(ask)
