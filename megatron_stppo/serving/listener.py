"""The trainer's side of the transport: one socket that receives from all replicas and sends to each."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

import zmq

from megatron_stppo.serving.client_check import ClientCheck, bind
from megatron_stppo.serving.keys import Connection
from megatron_stppo.serving.mailbox import Mailbox
from megatron_stppo.serving.messages import FromReplica, FromTrainer
from megatron_stppo.serving.payloads import (
    ALIVE,
    BEAT,
    CURVE_OVERHEAD,
    EXPELLED,
    INBOX,
    TAKEN,
    Unreadable,
    pack,
    unpack_from_replica,
)
from megatron_stppo.serving.socket_thread import LINGER, SocketThread

log = logging.getLogger(__name__)

MOST_PEERS = 4096
MOST_REMEMBERED = 65_536  # ids of expelled peers, and of those with dropped messages
BURST = 64  # messages that are read before queued ones are sent
UNREAD = 8  # messages of one peer that zmq holds while the socket is not read
UNSENT = 1000  # messages to one peer that zmq holds; a peer that does not read so many is expelled


class Listener:
    """Receives messages of replicas, and sends messages to them.

    address: of the interface to listen on, for example "127.0.0.1"; the system chooses the port.
    max_bytes: of one message in either direction. inbox_bytes: see payloads.INBOX.
    Raises ConfigError if `address` is not that of one interface of this machine.
    Any thread may call the methods. They raise RuntimeError if the thread of the socket has failed.

    Example: listener = Listener("127.0.0.1", 2**26); keys.write(run_folder, listener.connection), and then
    for peer, message in listener.take(1.0): ...
    """

    def __init__(self, address: str, max_bytes: int, inbox_bytes: int = INBOX) -> None:
        self._io = SocketThread("serving listener")
        self._max_bytes = max_bytes
        self._check = ClientCheck(self._io.context)
        self._router = self._io.context.socket(zmq.ROUTER)
        self._router.router_mandatory = True  # sending to a peer that is gone raises EHOSTUNREACH
        self._router.maxmsgsize = max_bytes + CURVE_OVERHEAD  # zmq closes the connection of a longer message
        self._router.rcvhwm, self._router.sndhwm = UNREAD, UNSENT
        try:
            self.connection: Connection = bind(self._router, address, self._check)
        except BaseException:
            self._io.context.destroy(linger=0)
            self._io.close()
            raise
        self._inbox = Mailbox(inbox_bytes, self._io.signal)
        self._outbox: deque[tuple[bytes, bytes]] = deque()
        self._lock = threading.Lock()  # guards the next four
        self._heard: dict[
            bytes, float
        ] = {}  # when a peer's last message arrived, for the peers that are there
        self._paused: float | None = None  # when the inbox became full
        self._expelled: dict[bytes, int] = {}
        self._dropped: dict[bytes, int] = {}  # messages per peer
        self._io.start(self._run, self._inbox.wake)

    def take(self, timeout: float) -> list[tuple[bytes, FromReplica | Unreadable]]:
        """Return messages with the ids of their peers; those of one peer in the order in which it sent them.

        Waits up to `timeout` seconds for one, or until `wake` is called. One call returns at most about TAKEN
        bytes; call again for more. A message that cannot be used is dropped and counted; the first one of a
        peer is also logged, and returned as Unreadable.
        """
        self._io.check()
        messages: list[tuple[bytes, FromReplica | Unreadable]] = []
        for peer, payload in self._inbox.take(timeout, TAKEN):
            if peer in self._expelled:
                continue
            message = unpack_from_replica(payload, self._max_bytes)
            if not isinstance(message, Unreadable) or self._is_first(peer, message):
                messages.append((peer, message))
        return messages

    def wake(self) -> None:
        """Make `take` return early in another thread, or at its next call."""
        self._inbox.wake()

    def send(self, peer: bytes, message: FromTrainer) -> bool:
        """Queue a message, without waiting. Return False, and send nothing, if the peer is gone or expelled.

        True does not mean that it will arrive: the peer may be gone by then. Raises ValueError if the message
        exceeds max_bytes.
        """
        self._io.check()
        payload = pack(message, self._max_bytes)
        with self._lock:
            is_there = peer in self._heard and not self._io.closing.is_set()
            if is_there:
                self._outbox.append((peer, payload))
        self._io.signal()
        return is_there

    def silence(self, peer: bytes) -> float:
        """Return the seconds since the peer's last message arrived; infinite if its connection has ended.

        The end of a connection is noticed within BEAT seconds, unless the peer's machine lost power. The time
        in which the inbox is full, because nobody calls `take`, is left out: nothing is read then.
        """
        with self._lock:
            if peer not in self._heard:
                return float("inf")
            return (self._paused or time.monotonic()) - self._heard[peer]

    def dropped(self, peer: bytes) -> int:
        """Return the number of a peer's messages that were too long or could not be decoded."""
        return self._dropped.get(peer, 0)

    def expel(self, peer: bytes) -> None:
        """Send what is queued for a peer, and ignore what it has sent and will send.

        zmq cannot close a single connection. Our Dialer closes it when it gets EXPELLED; what another program
        sends is received, which costs time, and discarded.
        """
        with self._lock:
            self._outbox.append((peer, EXPELLED))
            self._forget(peer)
        self._io.signal()

    def close(self) -> None:
        """Send what is queued, for at most LINGER seconds, and close all connections."""
        self._io.close()

    def _is_first(self, peer: bytes, message: Unreadable) -> bool:
        with self._lock:
            _remember(self._dropped, peer, self._dropped.get(peer, 0) + 1)
            if self._dropped[peer] > 1:
                return False
        log.warning("dropped a message of replica %s: %s", peer.hex(), message.why)
        return True

    # What follows runs in the thread of the socket, except _forget.

    def _run(self) -> None:
        self._io.poller.register(self._check.socket, zmq.POLLIN)
        self._io.poller.register(self._router, zmq.POLLIN)
        beat = time.monotonic() + BEAT
        while not self._io.closing.is_set():
            ready = self._io.wait(beat - time.monotonic())
            if self._check.socket in ready:
                self._check.answer()
            if self._router in ready:
                self._receive()
            self._pause_or_go_on()
            if time.monotonic() >= beat:
                beat = time.monotonic() + BEAT
                self._outbox.extend((peer, ALIVE) for peer in list(self._heard))
            self._send_queued()
        self._send_queued()
        self._router.close(linger=int(1000 * LINGER))
        self._check.socket.close(linger=0)

    def _receive(self) -> None:
        for _ in range(BURST):
            if self._inbox.full:
                return
            try:
                peer, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if self._is_accepted(peer):
                # our Dialer sends one frame; an empty payload cannot be decoded
                self._inbox.put(peer, frames[0] if len(frames) == 1 else b"")

    def _is_accepted(self, peer: bytes) -> bool:
        with self._lock:
            if peer in self._expelled:
                return False
            if peer not in self._heard and len(self._heard) >= MOST_PEERS:
                log.warning("ignored replica %s: %d others are connected", peer.hex(), MOST_PEERS)
                self._forget(peer)
                return False
            self._heard[peer] = time.monotonic()
            return True

    def _pause_or_go_on(self) -> None:
        """Read the socket unless the inbox is full; zmq then stops reading from TCP, and the senders wait."""
        with self._lock:
            if self._inbox.full and self._paused is None:
                self._paused = time.monotonic()
                self._io.poller.unregister(self._router)
            elif self._paused is not None and not self._inbox.full:
                pause, self._paused = time.monotonic() - self._paused, None
                self._heard = {peer: heard + pause for peer, heard in self._heard.items()}
                self._io.poller.register(self._router, zmq.POLLIN)

    def _send_queued(self) -> None:
        while self._outbox:
            peer, payload = self._outbox.popleft()
            try:
                self._router.send_multipart((peer, payload), zmq.NOBLOCK)
            except zmq.Again:
                with self._lock:
                    self._forget(peer)
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                with self._lock:
                    self._heard.pop(peer, None)

    def _forget(self, peer: bytes) -> None:
        self._heard.pop(peer, None)
        _remember(self._expelled, peer, 1)


def _remember(numbers: dict[bytes, int], peer: bytes, number: int) -> None:
    """Set a peer's number; the oldest peer beyond MOST_REMEMBERED is removed."""
    numbers[peer] = number
    if len(numbers) > MOST_REMEMBERED:
        del numbers[next(iter(numbers))]
