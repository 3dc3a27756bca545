"""An authenticated connection between the trainer and a replica; both sides use the same class.

Each side first proves that it has the key of the attempt, without sending it:

    trainer -> replica: 32 random bytes T
    replica -> trainer: 32 random bytes R, HMAC-SHA256(key, "replica" T R)
    trainer -> replica: HMAC-SHA256(key, "trainer" T R)

Every message is then sent as its length, a code and its bytes. The code is a keyed hash of these bytes and of
the message's number, so that nobody without the key can add, change, repeat or leave out a message. Nothing
is encrypted. This file imports the standard library only.

libzmq with CURVE takes in about as many episodes per second, and encrypts them. But it bounds neither the
connections without a key, nor what each of them holds below the size of the largest message, nor the number
of parts of a message, with which one replica fills the trainer's memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import math
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable

HANDSHAKE = 10.0  # seconds in which the other side must prove that it has the key
BEAT = 2.0  # seconds between signs of life
LINGER = 2.0  # seconds that closing waits for messages to be sent
UNSENT = 256 * 2**20  # bytes that are queued, of a side that does not read
NONCE = PROOF = 32  # bytes
CODE = 16
LENGTH = struct.Struct("!I")
OVERHEAD = 512  # bytes charged per message besides its payload: a flood of empty messages takes memory too
INBOX = 256 * 2**20  # bytes that were received and not taken; then no socket is read, and senders wait
TAKEN = 2**20  # bytes that one call of `take` returns, or one message. Decoded, they take up to 60 times more


class NotAuthentic(Exception):
    """The other side does not have the key."""


class Codes:
    """The codes of the messages in one direction.

    Example: Codes(key, b"trainer", nonces).next(b"payload") is the code of the first message, 16 bytes.
    """

    def __init__(self, key: bytes, sender: bytes, nonces: bytes) -> None:
        self._key, self._number = hmac.digest(key, b"messages of " + sender + nonces, "sha256"), 0

    def next(self, payload: bytes) -> bytes:
        self._number += 1
        code = hashlib.blake2b(self._number.to_bytes(8, "big"), key=self._key, digest_size=CODE)
        code.update(payload)
        return code.digest()


def authenticate(sock: socket.socket, key: bytes, is_trainer: bool) -> tuple[Codes, Codes]:
    """Return the codes of this side's and of the other side's messages.

    Takes at most HANDSHAKE seconds. Closes the socket, and raises NotAuthentic, if the other side does not
    have the key, or OSError if it does not answer in time or the connection ends.
    """
    ends, own = time.monotonic() + HANDSHAKE, secrets.token_bytes(NONCE)
    try:
        if is_trainer:
            sock.sendall(own)
            nonces = own + _read(sock, NONCE, ends)
            _check(_read(sock, PROOF, ends), key, b"replica", nonces)
            sock.sendall(hmac.digest(key, b"trainer" + nonces, "sha256"))
        else:
            nonces = _read(sock, NONCE, ends) + own
            sock.sendall(own + hmac.digest(key, b"replica" + nonces, "sha256"))
            _check(_read(sock, PROOF, ends), key, b"trainer", nonces)
        sock.settimeout(None)
    except (OSError, NotAuthentic):
        sock.close()
        raise
    sides = (b"trainer", b"replica") if is_trainer else (b"replica", b"trainer")
    return Codes(key, sides[0], nonces), Codes(key, sides[1], nonces)


class Channel:
    """Sends and receives payloads in two threads, until a side closes the connection.

    Between them it sends signs of life, so that a long computation in the caller's thread does not look like
    a crash, unless it holds Python's interpreter lock all that time. An empty payload is nothing else.
    """

    def __init__(
        self,
        sock: socket.socket,
        codes: tuple[Codes, Codes],
        max_bytes: int,
        inbox: Mailbox,
        ended: Callable[[Channel], None],
        beat: Callable[[], bytes] = bytes,
        name: str = "",
    ) -> None:
        """codes: see authenticate. max_bytes: of a payload; a longer one ends the connection. inbox: gets the
        payloads; the next one is read when it has room. ended: called after the last of them. beat: returns a
        sign of life. name: of the other side."""
        self.name, self.is_expelled = name, False  # expelled: its messages are ignored
        self._socket, self._max_bytes, self._beat = sock, max_bytes, beat
        (self._own, self._theirs), self._inbox, self._on_end = codes, inbox, ended
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a short message is sent at once
        self._queue: deque[bytes] = deque()
        self._queued = 0  # bytes, with those that are sent now
        self._closing = self._over = False
        self._changed = threading.Condition()  # guards the four above
        self._heard: float | None = time.monotonic()  # when the last payload arrived; None: see silence
        self._writer = threading.Thread(target=self._write, name="wire writer", daemon=True)
        self._reader = threading.Thread(target=self._read, name="wire reader", daemon=True)
        self._writer.start()
        self._reader.start()

    @property
    def silence(self) -> float:
        """The seconds since the last payload arrived; infinite if the connection has ended, which is noticed
        at once, unless the other machine lost power.

        0 while the inbox is full, because nothing is read then.
        """
        if self._over or self.is_expelled:
            return math.inf
        return 0.0 if (heard := self._heard) is None else time.monotonic() - heard

    def send(self, payload: bytes, waits: bool) -> bool:
        """Queue a payload. Return False, and send nothing, if the connection has ended.

        waits: while UNSENT bytes are queued, wait; otherwise return False.
        """
        with self._changed:
            if waits:
                self._changed.wait_for(lambda: self._queued < UNSENT or self._closing or self._over)
            if self._closing or self._over or self._queued >= UNSENT:
                return False
            self._queue.append(payload)
            self._queued += len(payload)
            self._changed.notify_all()
            return True

    def close(self) -> None:
        """Send what is queued, and close. Takes at most about LINGER seconds. May be called twice."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._reader.join(LINGER)  # it ends when the other side has closed, too
        self._shut(socket.SHUT_RDWR)

    def _write(self) -> None:
        try:
            while (payload := self._next()) is not None:
                self._socket.sendall(LENGTH.pack(len(payload)) + self._own.next(payload) + payload)
                with self._changed:
                    self._queued -= len(payload)
                    self._changed.notify_all()
        except OSError:
            pass  # the connection has ended: the other thread reads what has arrived, and then its end
        finally:
            self._shut(socket.SHUT_WR)

    def _next(self) -> bytes | None:
        """Wait for the next payload to send, and return it; None when no more will follow."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing or self._over, BEAT)
            if self._over or (self._closing and not self._queue):
                return None
            if self._queue:
                return self._queue.popleft()
            payload = self._beat()  # a queued message is a sign of life, too
            self._queued += len(payload)
            return payload

    def _read(self) -> None:
        try:
            while True:
                (length,) = LENGTH.unpack(_read(self._socket, LENGTH.size))
                if length > self._max_bytes:
                    return
                code, payload = _read(self._socket, CODE), _read(self._socket, length)
                if not hmac.compare_digest(code, self._theirs.next(payload)):
                    return
                if payload and not self.is_expelled:
                    self._heard = None
                    self._inbox.put(self, payload)
                self._heard = time.monotonic()
        except OSError:
            pass  # it has ended
        finally:
            self._on_end(self)  # before `silence` is infinite: it says why
            with self._changed:
                self._over = True
                self._changed.notify_all()
            self._shut(socket.SHUT_RDWR)  # ends the writer
            self._writer.join()
            self._socket.close()

    def _shut(self, how: int) -> None:
        with contextlib.suppress(OSError):  # it has ended already
            self._socket.shutdown(how)


def _read(sock: socket.socket, count: int, ends: float | None = None) -> bytes:
    """Return the next `count` bytes. ends: at which time.monotonic() a TimeoutError is raised."""
    received = bytearray(count)
    rest = memoryview(received)
    while rest:
        if ends is not None:
            sock.settimeout(max(0.001, ends - time.monotonic()))
        if not (arrived := sock.recv_into(rest)):
            raise ConnectionResetError("the other side has closed the connection")
        rest = rest[arrived:]
    return bytes(received)


def _check(proof: bytes, key: bytes, sender: bytes, nonces: bytes) -> None:
    if not hmac.compare_digest(proof, hmac.digest(key, sender + nonces, "sha256")):
        raise NotAuthentic("the other side does not have the key of this attempt")


class Mailbox:
    """A bounded queue of received messages in order of arrival, from the threads that read sockets to the
    thread that uses them. most_bytes: `put` waits while they take more."""

    def __init__(self, most_bytes: int = INBOX) -> None:
        self._most, self._bytes = most_bytes, 0
        self._messages: deque[tuple[Channel, bytes]] = deque()
        self._woken = self._closed = False
        self._changed = threading.Condition()

    def put(self, sender: Channel, payload: bytes) -> None:
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

    def take(self, timeout: float) -> list[tuple[Channel, bytes]]:
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
