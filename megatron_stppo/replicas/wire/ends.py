"""The two sides of the wire.

The trainer accepts the replicas that have the key of this attempt. A replica has one connection to the
trainer, and does not connect again after it has ended, because messages may have been lost with it. It then
ends, or starts over with a new Dialer and a new Hello.
"""

import contextlib
import logging
import math
import secrets
import socket
import threading
import time
from collections.abc import Callable

from megatron_stppo.base.printing import one_line
from megatron_stppo.replicas.wire.address import listen
from megatron_stppo.replicas.wire.channel import (
    HANDSHAKE,
    INBOX,
    Channel,
    Mailbox,
    NotAuthentic,
    authenticate,
)
from megatron_stppo.replicas.wire.keys import Connection
from megatron_stppo.replicas.wire.measure import Counters
from megatron_stppo.replicas.wire.messages import (
    Alive,
    FromReplica,
    FromTrainer,
    pack,
    unpack_from_replica,
    unpack_from_trainer,
)

log = logging.getLogger(__name__)

MOST_PEERS = 1024  # connected replicas
MOST_STRANGERS = 64  # connections that have not yet proved that they have the key
RETRY = 1.0  # seconds after which a failed accept is repeated, for example if too many files are open


class Listener:
    """Receives messages of replicas, and sends messages to them. A peer is the Channel of one connection.

    address: of the interface to listen on, for example "127.0.0.1"; the system chooses the port.
    max_bytes: of one message in either direction. inbox_bytes: see channel.INBOX.
    Raises ConfigError if `address` is not that of one interface of this machine.
    Any thread may call the methods.

    Example: wire = Listener("127.0.0.1", 2**26); keys.write(run_folder, wire.connection), and then
    for peer, message in wire.take(1.0): ...
    """

    def __init__(self, address: str, max_bytes: int, inbox_bytes: int = INBOX) -> None:
        self._server, self._max_bytes, self._key = listen(address), max_bytes, secrets.token_bytes(32)
        self._inbox = Mailbox(inbox_bytes)
        self._strangers = threading.Semaphore(MOST_STRANGERS)
        self._lock = threading.Lock()  # guards the next three
        self._peers: set[Channel] = set()
        self._accepted = 0
        self._has_warned = self._closed = False
        host, port = self._server.getsockname()[:2]
        self.connection = Connection(host, port, self._key.hex())
        threading.Thread(target=self._accept, name="wire listener", daemon=True).start()

    def take(self, timeout: float) -> list[tuple[Channel, FromReplica]]:
        """Return messages with their peers; those of one peer in the order of sending.

        Waits up to `timeout` seconds for one, or until `wake` is called. One call returns at most about TAKEN
        bytes; call again for more. A peer whose message cannot be decoded is expelled, which is logged.
        """
        messages: list[tuple[Channel, FromReplica]] = []
        for peer, payload in self._inbox.take(timeout):
            if peer.is_expelled:
                continue
            try:
                messages.append((peer, unpack_from_replica(payload)))
            except ValueError as error:
                log.warning("replica %s is expelled for a message: %s", peer.name, error)
                self.expel(peer)
        return messages

    def wake(self) -> None:
        """Make `take` return early in another thread, or at its next call."""
        self._inbox.wake()

    def send(self, peer: Channel, message: FromTrainer) -> bool:
        """Queue a message, without waiting. Return False, and send nothing, if the peer is gone or expelled.

        A peer that does not read is expelled. True does not mean that the message will arrive: the peer may
        be gone by then. Raises ValueError if the message exceeds max_bytes.
        """
        is_queued = peer.send(pack(message, self._max_bytes), waits=False)
        if not is_queued:
            self.expel(peer)
        return is_queued

    def expel(self, peer: Channel) -> None:
        """Send what is queued for a peer, close its connection, and ignore what it has sent."""
        peer.is_expelled = True
        self._forget(peer)
        _close(peer)

    def close(self) -> None:
        """Send what is queued, for at most LINGER seconds, and close all connections."""
        with self._lock:
            self._closed = True
            peers = list(self._peers)
        with contextlib.suppress(OSError):  # it is closed already
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._inbox.close()
        for closing in [_close(peer) for peer in peers]:
            closing.join()

    def _forget(self, peer: Channel) -> None:
        with self._lock:
            self._peers.discard(peer)

    # What follows runs in threads of its own.

    def _accept(self) -> None:
        with self._server:
            while not self._closed:
                try:
                    sock, where = self._server.accept()
                except OSError:
                    time.sleep(0.0 if self._closed else RETRY)
                    continue
                with self._lock:
                    has_room = len(self._peers) < MOST_PEERS
                if has_room and self._strangers.acquire(blocking=False):
                    threading.Thread(target=self._greet, args=(sock, where[0]), daemon=True).start()
                else:
                    sock.close()
                    self._warn(f"refused a client at {one_line(where[0])}: too many are connected")

    def _greet(self, sock: socket.socket, host: str) -> None:
        codes = None
        try:
            codes = authenticate(sock, self._key, is_trainer=True)
        except NotAuthentic:
            self._warn(f"refused a client at {one_line(host)}, which does not have the key of this attempt")
        except OSError:
            pass  # it went away, or did not answer in time
        self._strangers.release()
        if codes is None:
            return
        with self._lock:
            if self._closed:
                return sock.close()
            self._accepted += 1
            name = str(self._accepted)
            self._peers.add(Channel(sock, codes, self._max_bytes, self._inbox, self._forget, name=name))

    def _warn(self, text: str) -> None:
        """Log the first refusal. An attacker could cause any number of them."""
        with self._lock:
            if self._has_warned:
                return
            self._has_warned = True
        log.warning("%s", text)


def _close(peer: Channel) -> threading.Thread:
    """Close a connection in a thread, which is returned."""
    thread = threading.Thread(target=peer.close, name="wire close", daemon=True)
    thread.start()
    return thread


class Dialer:
    """Connects to the trainer, sends messages to it, and receives its messages.

    max_bytes: of one message in either direction; the same as the trainer's.
    counters: called every BEAT seconds by a thread of the connection; returns the newest counters at once.
    ended: why the connection has ended, in one line; "" if it has not. `take` still returns what arrived.
    Any thread may call the methods.

    Example: wire = Dialer(keys.find(run_folder, 60.0), 2**26); wire.send(Hello(...)), and then
    for message in wire.take(1.0): ...
    """

    def __init__(
        self, connection: Connection, max_bytes: int, counters: Callable[[], Counters] = Counters
    ) -> None:
        self._max_bytes, self._address = max_bytes, connection.address
        self._inbox, self.ended = Mailbox(), ""
        self._channel: Channel | None = None
        try:
            sock = socket.create_connection((connection.host, connection.port), timeout=HANDSHAKE)
            codes = authenticate(sock, bytes.fromhex(connection.key), is_trainer=False)
        except ConnectionRefusedError:
            return self._end("nothing listens there")
        except (OSError, NotAuthentic) as error:
            return self._end(
                "what listens there is not the trainer of this connection file, or does not accept its key "
                f"({error})"
            )
        self._channel = Channel(
            sock, codes, max_bytes, self._inbox, self._lose, lambda: pack(Alive(counters()), max_bytes)
        )

    @property
    def silence(self) -> float:
        """The seconds since the trainer's last message, or since the start; infinite after the end."""
        return math.inf if self._channel is None or self.ended else self._channel.silence

    def take(self, timeout: float) -> list[FromTrainer]:
        """Return the trainer's messages in order, without its signs of life.

        Waits up to `timeout` seconds for one; returns early if the connection ends, or `wake` is called.
        Raises msgspec.MsgspecError for a message that cannot be decoded: the trainer runs another version.
        """
        return [unpack_from_trainer(payload) for _, payload in self._inbox.take(timeout)]

    def wake(self) -> None:
        """Make `take` return early in another thread, or at its next call."""
        self._inbox.wake()

    def send(self, message: FromReplica) -> bool:
        """Queue a message. Return False, and send nothing, if the connection has ended.

        Waits while UNSENT bytes are queued. Raises ValueError if the message exceeds max_bytes.
        """
        payload = pack(message, self._max_bytes)
        return self._channel is not None and self._channel.send(payload, waits=True)

    def close(self) -> None:
        """Send what is queued, for at most LINGER seconds, and close the connection."""
        self._inbox.close()
        if self._channel is not None:
            self._channel.close()

    def _lose(self, channel: Channel) -> None:
        self._end("the trainer has ended or has expelled this replica, or the network has failed")

    def _end(self, why: str) -> None:
        self.ended = f"{self._address}: {why}"
        self._inbox.close()
