"""Listeners and Dialers of tests, over real sockets on the loopback interface."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from megatron_stppo.replicas.wire import channel as channel_file
from megatron_stppo.replicas.wire.channel import LENGTH, Channel, authenticate
from megatron_stppo.replicas.wire.ends import Dialer, Listener
from megatron_stppo.replicas.wire.keys import Connection
from megatron_stppo.replicas.wire.measure import Counters
from megatron_stppo.replicas.wire.messages import Ready, pack

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
def connected(counters: Counters | None = None) -> Iterator[tuple[Listener, Dialer, Channel]]:
    with listening() as listener, dialing(listener, lambda: counters or Counters()) as dialer:
        dialer.send(Ready(0))
        ((peer, _),) = taken(listener, 1)
        yield listener, dialer, peer


@contextmanager
def replica_process(
    to: Connection, payload: bytes = READY, then: str = "time.sleep(60)"
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that connects with the key of `to`, sends a payload, runs `then` and reads nothing."""
    code = (
        "import socket, sys, time\n"
        "from megatron_stppo.replicas.wire.channel import LENGTH, authenticate\n"
        "host, port, key = sys.argv[1:]\n"
        "client, payload = socket.create_connection((host, int(port))), sys.stdin.buffer.read()\n"
        "own, _ = authenticate(client, bytes.fromhex(key), is_trainer=False)\n"
        "def send(payload):\n"
        "    client.sendall(LENGTH.pack(len(payload)) + own.next(payload) + payload)\n"
        f"send(payload)\n{then}\n"
    )
    arguments = (sys.executable, "-c", code, to.host, str(to.port), to.key)
    process = subprocess.Popen(arguments, stdin=subprocess.PIPE)
    assert process.stdin is not None
    with process.stdin as stdin:
        stdin.write(payload)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def raw_client(to: Connection) -> Iterator[Callable[[bytes], None]]:
    """Connect with the key of `to`, and yield a function that sends any payload."""
    with socket.create_connection((to.host, to.port)) as client:
        own, _ = authenticate(client, bytes.fromhex(to.key), is_trainer=False)
        yield lambda payload: client.sendall(LENGTH.pack(len(payload)) + own.next(payload) + payload)


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
    monkeypatch.setattr(channel_file, "BEAT", 0.1)
