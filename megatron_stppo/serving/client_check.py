"""Accepts the clients of one attempt only: keys, a listening socket, and the check of a client's key.

zmq sends a request to the check before a connection carries any message (ZAP, ZeroMQ's RFC 27). Without the
check, CURVE accepts every client that has the server's public key.
"""

from __future__ import annotations

import hmac
import logging
import secrets

import zmq
from zmq.utils import z85

from megatron_stppo.messages import one_line
from megatron_stppo.serving.address import cannot_listen, interface
from megatron_stppo.serving.keys import Connection

log = logging.getLogger(__name__)

DOMAIN = b"replicas"
HANDLER = "inproc://zeromq.zap.01"  # the address to which libzmq sends these requests
BACKLOG = 1024  # connections that the system holds until zmq accepts them: all replicas may start at once


class ClientCheck:
    """The keys of one attempt, and the check: when `socket` is readable, its owner calls `answer`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.server_key, self.server_secret = zmq.curve_keypair()
        self.client_key, self.client_secret = zmq.curve_keypair()
        self.attempt = secrets.token_hex(8)
        self._expected = z85.decode(self.client_key)
        self._refused = 0
        self.socket = context.socket(zmq.REP)
        self.socket.bind(HANDLER)

    def protect(self, server: zmq.Socket[bytes]) -> None:
        """Make `server` accept clients with the client's key only. Call it before bind."""
        server.curve_server = True
        server.curve_secretkey = self.server_secret
        server.zap_domain = DOMAIN
        server.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without the check's answer nobody is accepted

    def answer(self) -> None:
        """Answer one request of zmq: whether a client is accepted."""
        version, request, domain, address, _, mechanism, *credentials = self.socket.recv_multipart()
        key = credentials[0] if mechanism == b"CURVE" and domain == DOMAIN and credentials else b""
        accepted = hmac.compare_digest(key, self._expected)
        self._refused += not accepted
        if self._refused == 1 and not accepted:
            where = one_line(address.decode("ascii", "replace"))
            log.warning("refused a client at %s, which has not the key of this attempt", where)
        self.socket.send_multipart((version, request, b"200" if accepted else b"400", b"", b"", b""))


def bind(server: zmq.Socket[bytes], address: str, check: ClientCheck) -> Connection:
    """Let `server` listen on a random port of one interface, and return how a client connects to it.

    Raises ConfigError if `address` is not one of this machine's, or stands for all interfaces.
    """
    ip = interface(address)
    check.protect(server)
    server.backlog = BACKLOG
    server.ipv6 = ip.version == 6
    host = f"[{ip}]" if ip.version == 6 else str(ip)
    try:
        server.bind(f"tcp://{host}:*")
    except zmq.ZMQError as error:
        raise cannot_listen(address, ip, error.errno or 0) from None
    return Connection(
        address=server.get_string(zmq.LAST_ENDPOINT),
        server_key=check.server_key.decode(),
        client_key=check.client_key.decode(),
        client_secret=check.client_secret.decode(),
        attempt=check.attempt,
    )
