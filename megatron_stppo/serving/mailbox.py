"""A bounded queue of received messages, from the thread that owns a socket to the thread that uses them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

OVERHEAD = 512  # bytes charged per message besides its payload: a flood of empty messages takes memory too


class Mailbox:
    """Messages of peers in order of arrival: (peer id, payload).

    most_bytes: when the messages take more, `full` is True, and the owner of the socket stops reading it.
    drained: called by `take` after it has made room in a full mailbox; it must wake the owner of the socket.
    """

    def __init__(self, most_bytes: int, drained: Callable[[], None]) -> None:
        self._most, self._drained = most_bytes, drained
        self._messages: deque[tuple[bytes, bytes]] = deque()
        self._bytes, self._woken = 0, False
        self._changed = threading.Condition()

    @property
    def full(self) -> bool:
        return self._bytes >= self._most

    def put(self, peer: bytes, payload: bytes) -> None:
        """Append a message, even if the mailbox is full."""
        with self._changed:
            self._messages.append((peer, payload))
            self._bytes += len(payload) + OVERHEAD
            self._changed.notify_all()

    def wake(self) -> None:
        """Make `take` return, now or at its next call, even without a message."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def take(self, timeout: float, most_bytes: int) -> list[tuple[bytes, bytes]]:
        """Return the oldest messages: all of them, or as many as exceed `most_bytes` by at most one message.

        Waits up to `timeout` seconds for one. [] if none has arrived, or if `wake` was called.
        """
        ends, taken, size = time.monotonic() + timeout, [], 0
        with self._changed:
            while not self._messages and not self._woken and (left := ends - time.monotonic()) > 0:
                self._changed.wait(left)
            self._woken = False
            was_full = self.full
            while self._messages and size < most_bytes:
                taken.append(self._messages.popleft())
                size += len(taken[-1][1]) + OVERHEAD
            self._bytes -= size
        if was_full:
            self._drained()
        return taken
