"""A replica's side of the wire: one connection to the trainer.

It does not connect again after the connection has ended, because messages may have been lost with it. The
replica then ends, or starts over with a new Dialer and a new Hello.
"""

import math
import socket
from collections.abc import Callable

from megatron_stppo.replicas.wire.channel import HANDSHAKE, Channel, Mailbox, NotAuthentic, authenticate
from megatron_stppo.replicas.wire.keys import Connection
from megatron_stppo.replicas.wire.measure import Counters
from megatron_stppo.replicas.wire.messages import Alive, FromReplica, FromTrainer, pack, unpack_from_trainer


class Dialer:
    """Connects to the trainer, sends messages to it, and receives its messages.

    max_bytes: of one message in either direction; the same as the trainer's.
    counters: called every BEAT seconds by a thread of the connection; returns the newest counters at once.
    ended: why the connection has ended, in one line; "" if it has not. `take` still returns what arrived.
    Any thread may call the methods.

    Example: dialer = Dialer(keys.find(run_folder, 60.0), 2**26); dialer.send(Hello(...)), and then
    for message in dialer.take(1.0): ...
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
