"""A replica's side of the transport: one connection to the trainer."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

from megatron_stppo.serving.keys import Connection
from megatron_stppo.serving.mailbox import Mailbox
from megatron_stppo.serving.messages import Alive, Counters, FromReplica, FromTrainer
from megatron_stppo.serving.payloads import (
    ALIVE,
    BEAT,
    CURVE_OVERHEAD,
    EXPELLED,
    INBOX,
    TAKEN,
    pack,
    unpack_from_trainer,
)
from megatron_stppo.serving.socket_thread import LINGER, SocketThread

OUTBOX = 256 * 2**20  # bytes that are queued; then `send` waits, because the trainer does not read
DAY = 24 * 3600 * 1000  # milliseconds
# Why a connection ends, by the events of zmq's monitor; the first one counts.
ENDS = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the trainer does not accept the key of this connection file",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "what listens there is not the trainer of this connection file",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "what listens there is not the trainer of this connection file",
    zmq.EVENT_CLOSED: "nothing listens there",
    zmq.EVENT_DISCONNECTED: "the trainer has ended, or the network has closed the connection",
    zmq.EVENT_CONNECT_RETRIED: "the address cannot be reached",
}


class Dialer:
    """Sends messages to the trainer, and receives its messages.

    max_bytes: of one message in either direction; the same as the trainer's.
    counters: called every BEAT seconds by the thread of the socket; returns the newest counters at once.
    Any thread may call the methods. They raise RuntimeError if the thread of the socket has failed.

    Example: dialer = Dialer(keys.read(run_folder, 60.0), 2**26); dialer.send(Hello(...)), and then
    for message in dialer.take(1.0): ...
    """

    def __init__(
        self, connection: Connection, max_bytes: int, counters: Callable[[], Counters] = Counters
    ) -> None:
        self._io = SocketThread("serving dialer")
        self._max_bytes, self._counters, self._address = max_bytes, counters, connection.address
        self._socket = self._io.context.socket(zmq.DEALER)
        self._socket.curve_serverkey = connection.server_key.encode()
        self._socket.curve_publickey = connection.client_key.encode()
        self._socket.curve_secretkey = connection.client_secret.encode()
        self._socket.maxmsgsize = max_bytes + CURVE_OVERHEAD
        self._socket.ipv6 = "[" in connection.address
        # The thread closes the socket when its connection ends, long before zmq connects again. With -1 zmq
        # would never connect again, but it would discard received messages when the connection ends.
        self._socket.reconnect_ivl = DAY
        self._events = self._socket.get_monitor_socket()
        self._inbox = Mailbox(INBOX, self._io.signal)
        self._outbox: deque[bytes] = deque()
        self._queued = 0  # bytes
        self._room = threading.Condition()  # guards the outbox
        self._ending, self._ended = "", ""
        self._heard = time.monotonic()
        self._socket.connect(connection.address)
        self._io.start(self._run, self._release)

    @property
    def ended(self) -> str:
        """Why the connection has ended, in one line; "" if it has not. `take` still returns what arrived."""
        return self._ended

    @property
    def silence(self) -> float:
        """The seconds since the trainer's last message, or since the start; infinite after the end."""
        return float("inf") if self._over else time.monotonic() - self._heard

    def take(self, timeout: float) -> list[FromTrainer]:
        """Return the trainer's messages in order, without its signs of life.

        Waits up to `timeout` seconds for one; returns early if the connection ends, or `wake` is called.
        Raises msgspec.MsgspecError for a message that cannot be decoded: the trainer runs another version.
        """
        self._io.check()
        waiting = 0.0 if self._over else timeout
        return [unpack_from_trainer(payload) for _, payload in self._inbox.take(waiting, TAKEN)]

    def wake(self) -> None:
        """Make `take` return early in another thread, or at its next call."""
        self._inbox.wake()

    def send(self, message: FromReplica) -> bool:
        """Queue a message. Return False, and send nothing, if the connection has ended.

        Waits while OUTBOX bytes are queued. Raises ValueError if the message exceeds max_bytes.
        """
        self._io.check()
        payload = pack(message, self._max_bytes)
        with self._room:
            self._room.wait_for(lambda: self._queued < OUTBOX or self._over)
            if self._over:
                return False
            self._outbox.append(payload)
            self._queued += len(payload)
        self._io.signal()
        return True

    def close(self) -> None:
        """Send what is queued, for at most LINGER seconds, and close the connection."""
        self._io.close()

    @property
    def _over(self) -> bool:
        return bool(self._ended) or self._io.closing.is_set() or self._io.failure is not None

    # What follows runs in the thread of the socket.

    def _run(self) -> None:
        self._io.poller.register(self._events, zmq.POLLIN)
        beat, deadline, has_sent = time.monotonic() + BEAT, float("inf"), False
        while not self._ended and time.monotonic() < deadline:
            if self._io.closing.is_set():
                deadline = min(deadline, time.monotonic() + LINGER)
                if not self._outbox:
                    break
            wanted = (0 if self._inbox.full else zmq.POLLIN) | (zmq.POLLOUT if self._outbox else 0)
            self._io.poller.register(self._socket, wanted)  # 0: leaves it out
            ready = self._io.wait(min(beat, deadline) - time.monotonic())
            if self._events in ready:
                self._notice(recv_monitor_message(self._events)["event"])
            self._receive()
            has_sent = self._send_queued() or has_sent
            if time.monotonic() >= beat:
                beat = time.monotonic() + BEAT
                if has_sent and not self._outbox:  # a queued message is a sign of life, too
                    self._queue_alive()
        self._socket.disable_monitor()
        self._events.close(linger=0)
        self._socket.close(linger=0 if self._ended else int(1000 * LINGER))

    def _queue_alive(self) -> None:
        payload = pack(Alive(self._counters()), self._max_bytes)
        with self._room:
            self._outbox.append(payload)
            self._queued += len(payload)

    def _notice(self, event: int) -> None:
        why = ENDS.get(zmq.Event(event))
        if why and not self._ending:
            self._ending = f"{self._address}: {why}"

    def _receive(self) -> None:
        """Read until nothing is left. Then, if the connection has ended, there will be nothing more."""
        while not self._inbox.full:
            try:
                payload = b"".join(self._socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                self._ended = self._ending
                return
            self._heard = time.monotonic()
            if payload == EXPELLED:
                self._ended = f"{self._address}: the trainer does not accept more messages of this replica"
                return
            if payload != ALIVE:
                self._inbox.put(b"", payload)
        self._heard = time.monotonic()  # not read, because nobody calls `take`

    def _send_queued(self) -> bool:
        """Send while zmq has room. Return whether something was sent."""
        sent = False
        while self._outbox:
            try:
                self._socket.send(self._outbox[0], zmq.NOBLOCK)
            except zmq.Again:
                return sent
            sent = True
            with self._room:
                self._queued -= len(self._outbox.popleft())
                self._room.notify_all()
        return sent

    def _release(self) -> None:
        """Release the callers that wait."""
        self._inbox.wake()
        with self._room:
            self._room.notify_all()
