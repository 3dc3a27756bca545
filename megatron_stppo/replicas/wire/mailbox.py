"""A bounded queue of received messages, from the threads that read sockets to the thread that uses them."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

OVERHEAD = 512  # bytes charged per message besides its payload: a flood of empty messages takes memory too
INBOX = 256 * 2**20  # bytes that were received and not taken; then no socket is read, and senders wait
TAKEN = 2**20  # bytes that one call of `take` returns, or one message. Decoded, they take up to 60 times more
Sender = TypeVar("Sender")


class Mailbox(Generic[Sender]):
    """Messages in order of arrival: (sender, payload). most_bytes: `put` waits while they take more."""

    def __init__(self, most_bytes: int = INBOX) -> None:
        self._most, self._bytes = most_bytes, 0
        self._messages: deque[tuple[Sender, bytes]] = deque()
        self._woken = self._closed = False
        self._changed = threading.Condition()

    def put(self, sender: Sender, payload: bytes) -> None:
        """Append a message as soon as there is room. After `close` it is discarded."""
        with self._changed:
            self._changed.wait_for(lambda: self._bytes < self._most or self._closed)
            if not self._closed:
                self._messages.append((sender, payload))
                self._bytes += len(payload) + OVERHEAD
                self._changed.notify_all()

    def wake(self) -> None:
        """Make `take` return, now or at its next call, even without a message."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def close(self) -> None:
        """Let nobody wait any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def take(self, timeout: float) -> list[tuple[Sender, bytes]]:
        """Return the oldest messages: all of them, or as many as exceed TAKEN bytes by at most one message.

        Waits up to `timeout` seconds for one. [] if none has arrived, or if `wake` was called.
        """
        taken, size = [], 0
        with self._changed:
            self._changed.wait_for(lambda: self._messages or self._woken or self._closed, timeout)
            self._woken = False
            while self._messages and size < TAKEN:
                taken.append(self._messages.popleft())
                size += len(taken[-1][1]) + OVERHEAD
            self._bytes -= size
            self._changed.notify_all()
        return taken
