"""Listeners and Dialers of tests, over real sockets on the loopback interface."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq

from megatron_stppo.serving import dialer as dialer_file
from megatron_stppo.serving import listener as listener_file
from megatron_stppo.serving.keys import Connection
from megatron_stppo.serving.messages import Counters, Ready
from megatron_stppo.serving.payloads import pack
from megatron_stppo.serving.transport import Dialer, Listener

MAX = 2**20  # bytes of a message
READY = pack(Ready(1), MAX)


@contextmanager
def listening(**options: Any) -> Iterator[Listener]:
    listener = Listener("127.0.0.1", MAX, **options)
    try:
        yield listener
    finally:
        listener.close()


@contextmanager
def dialing(listener: Listener, counters: Callable[[], Counters] = Counters) -> Iterator[Dialer]:
    dialer = Dialer(listener.connection, MAX, counters)
    try:
        yield dialer
    finally:
        dialer.close()


@contextmanager
def connected(counters: Counters | None = None) -> Iterator[tuple[Listener, Dialer, bytes]]:
    with listening() as listener, dialing(listener, lambda: counters or Counters()) as dialer:
        dialer.send(Ready(0))
        ((peer, _),) = taken(listener, 1)
        yield listener, dialer, peer


@contextmanager
def replica_process(
    to: Connection, payload: bytes = READY, then: str = "time.sleep(60)"
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that connects with the keys of `to`, sends a payload, runs `then` and reads nothing.

    It imports only zmq, which is quick.
    """
    code = (
        "import sys, time, zmq\n"
        "address, server, client, secret = sys.argv[1:]\n"
        "socket, payload = zmq.Context().socket(zmq.DEALER), sys.stdin.buffer.read()\n"
        "socket.curve_serverkey, socket.curve_publickey = server.encode(), client.encode()\n"
        "socket.curve_secretkey = secret.encode()\n"
        "socket.connect(address)\n"
        f"socket.send(payload)\n{then}\n"
    )
    arguments = (to.address, to.server_key, to.client_key, to.client_secret)
    process = subprocess.Popen((sys.executable, "-c", code, *arguments), stdin=subprocess.PIPE)
    assert process.stdin is not None
    with process.stdin as stdin:
        stdin.write(payload)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def raw_client(to: Connection, curve: bool = True, routing_id: bytes = b"") -> Iterator[zmq.Socket[bytes]]:
    """Yield a connected zmq socket, with the keys of `to` or without encryption, which can send anything."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    if curve:
        socket.curve_serverkey, socket.curve_publickey = to.server_key.encode(), to.client_key.encode()
        socket.curve_secretkey = to.client_secret.encode()
    if routing_id:
        socket.routing_id = routing_id
    socket.connect(to.address)
    try:
        yield socket
    finally:
        context.destroy(linger=0)


def taken(side: Any, count: int) -> list[Any]:
    """Return the next `count` messages. There must be no others yet."""
    found = first_of(side, count)
    assert len(found) == count
    return found


def first_of(side: Any, count: int) -> list[Any]:
    """Return the next messages, at least `count`: signs of life may follow at any time (`quick`)."""
    found: list[Any] = []
    until(lambda: found.extend(side.take(1.0)) or len(found) >= count)
    return found


def until(is_true: Callable[[], Any]) -> None:
    ends = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < ends, "not true within 30 s"
        time.sleep(0.01)


def seconds(call: Callable[[], object]) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_file, "BEAT", 0.1)
    monkeypatch.setattr(dialer_file, "BEAT", 0.1)
