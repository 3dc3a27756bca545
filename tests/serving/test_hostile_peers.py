"""What an attacker on the network, or a replica that is not what it says, can do to the trainer's socket.

The attackers of the first tests can reach the port, and read and send packets, but have no key. Those of the
later tests have the keys of the connection file.
"""

from __future__ import annotations

import logging
import math
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq

from megatron_stppo.serving import listener as listener_file
from megatron_stppo.serving.client_check import ClientCheck, bind
from megatron_stppo.serving.messages import (
    Alive,
    Announce,
    Done,
    Leaving,
    Ready,
    Stop,
)
from megatron_stppo.serving.payloads import pack, unpack_from_replica
from megatron_stppo.serving.transport import Dialer, Listener, Unreadable
from megatron_stppo.types import Task, Trajectory
from tests.serving.peers import (
    MAX,
    READY,
    connected,
    dialing,
    listening,
    raw_client,
    replica_process,
    taken,
    until,
)

# ---- without a key


def test_a_client_with_keys_of_its_own_is_refused_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with listening() as listener:
        public, secret = (key.decode() for key in zmq.curve_keypair())
        other = replace(listener.connection, client_key=public, client_secret=secret)
        for _ in range(3):
            with closing(Dialer(other, MAX)) as dialer:
                dialer.send(Ready(1))
                until(lambda dialer=dialer: bool(dialer.ended))
                assert "the trainer does not accept the key of this connection file" in dialer.ended
        assert listener.take(0.1) == []
        assert [record.getMessage() for record in caplog.records] == [
            "refused a client at 127.0.0.1, which has not the key of this attempt"
        ]
        still_serves(listener)


def test_the_keys_of_an_earlier_attempt_are_refused() -> None:
    with listening() as earlier, listening() as listener:
        old = replace(earlier.connection, address=listener.connection.address)
        for keys in (old, replace(old, server_key=listener.connection.server_key)):
            with closing(Dialer(keys, MAX)) as dialer:
                dialer.send(Ready(1))
                until(lambda dialer=dialer: bool(dialer.ended))
        assert listener.take(0.1) == []


def test_a_client_without_encryption_gets_nothing_through() -> None:
    with listening() as listener, raw_client(listener.connection, curve=False) as client:
        client.send(READY)
        assert listener.take(0.3) == [] and not client.poll(0)
        still_serves(listener)


def test_if_the_check_of_keys_fails_nobody_is_accepted() -> None:
    context = zmq.Context()
    check, server = ClientCheck(context), context.socket(zmq.ROUTER)
    connection = bind(server, "127.0.0.1", check)
    check.socket.close()
    with closing(Dialer(connection, MAX)) as dialer:
        dialer.send(Ready(1))
        until(lambda: bool(dialer.ended))
        assert not server.poll(100)
    context.destroy(linger=0)


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nHost: trainer\r\n\r\n",
        b"\0" * 100_000,
        b"\xff" * 100_000,
        random.Random(1).randbytes(100_000),
        b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x00CURVE"
        + b"\0" * 47
        + b"\x06"
        + b"\xff" * 1000,  # a length of 2**64 - 1
    ],
    ids=["http", "zeros", "ones", "random", "length"],
)
def test_other_protocols_and_garbage_on_the_port_do_no_harm(sent: bytes) -> None:
    with listening() as listener:
        for _ in range(3):
            with socket.create_connection(where(listener)) as attacker, suppressed():
                attacker.sendall(sent)
        still_serves(listener)
        assert listener.take(0.0) == []


def test_recorded_packets_are_unreadable_and_cannot_be_sent_again() -> None:
    """A proxy records the bytes of a whole connection, and sends them over two others."""
    with listening() as listener:
        secret = "a sentence of the policy"
        with recording(where(listener)) as (port, recorded):
            through = replace(listener.connection, address=f"tcp://127.0.0.1:{port}")
            with closing(Dialer(through, MAX)) as dialer:
                dialer.send(Leaving(secret))
                ((peer, _),) = taken(listener, 1)
                listener.send(peer, Stop(secret))
                assert taken(dialer, 1) == [Stop(secret)]
        there, back = (b"".join(parts) for parts in recorded)
        assert b"CURVE" in there and len(there) > 400 and len(back) > 200
        assert b"sentence" not in there and b"sentence" not in back and b"Leaving" not in there
        for bytes_again in (there, there + there):
            with socket.create_connection(where(listener)) as attacker, suppressed():
                attacker.sendall(bytes_again)
                attacker.settimeout(5)
                while attacker.recv(4096):
                    pass
        assert listener.take(0.1) == []
        still_serves(listener)


def test_the_port_is_only_reachable_on_the_chosen_interface() -> None:
    with listening() as listener:
        _, port = where(listener)
        own = [address for found in psutil.net_if_addrs().values() for address in found]
        others = {address.address for address in own if address.family == socket.AF_INET}
        for address in {"127.0.0.2", *others} - {"127.0.0.1"}:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((address, port), timeout=5)
        lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
        listens = [line.split()[1] for line in lines if line.split()[3] == "0A"]
        assert [place for place in listens if place.endswith(f":{port:04X}")] == [f"0100007F:{port:04X}"]


# ---- with the key


def test_a_huge_message_ends_its_connection_and_no_other() -> None:
    with connected() as (listener, dialer, peer), raw_client(listener.connection) as client:
        client.send(b"x" * (2 * MAX))
        assert listener.take(0.3) == []
        dialer.send(Ready(2))
        assert taken(listener, 1) == [(peer, Ready(2))]


def test_messages_that_cannot_be_used_are_dropped_counted_and_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with listening() as listener, raw_client(listener.connection) as client:
        client.send(b"\xc1 not msgpack")
        ((peer, found),) = taken(listener, 1)
        assert isinstance(found, Unreadable)
        client.send(pack(Stop("of the trainer"), MAX))  # a valid message of the other direction
        client.send(b"x" * (MAX + 1))  # zmq's limit is a little higher
        client.send_multipart([READY, READY])
        client.send(b"")
        client.send(READY)
        assert taken(listener, 1) == [(peer, Ready(1))]
        assert listener.dropped(peer) == 5 and listener.dropped(b"other") == 0
        assert [record.getMessage() for record in caplog.records] == [
            f"dropped a message of replica {peer.hex()}: {found.why}"
        ]


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (pack(Stop("x"), MAX), "Invalid value 'Stop' - at `$.type`"),
        (b"x" * (MAX + 1), "1048577 bytes exceed the limit of 1048576"),
        (msgspec.msgpack.encode({"type": "Ready", "version": 1, "more": 2}), "unknown field `more`"),
        (msgspec.msgpack.encode({"type": "Ready", "version": "1"}), "Expected `int`, got `str`"),
        (msgspec.msgpack.encode({"type": "\x1b[2J\u202e\n"}), "Invalid value"),
        (msgspec.msgpack.encode({"type": "Leaving", "reason": b"\xff"}), "Expected `str`, got `bytes`"),
        (b"\x82\xa4type\xa7Leaving\xa6reason\xa1\xff", ""),  # not UTF-8
        (b"\x91" * 900_000, ""),  # 900,000 lists, one in the other
    ],
)
def test_the_reason_names_what_is_wrong_in_one_printable_line(payload: bytes, why: str) -> None:
    found = unpack_from_replica(payload, MAX)
    assert isinstance(found, Unreadable) and why in found.why
    assert found.why.isprintable() and len(found.why) <= 200


def test_no_payload_makes_the_trainer_raise() -> None:
    """In valid messages a part is replaced by any value, and bytes are changed, removed and inserted."""
    draw = random.Random(5)
    task = Task("t", (), ("a",), "train", 1, {"deep": [{"k": 1.5}]})
    valid = pack(Done(7, Trajectory(task, (1, 2), (), "error")), MAX)
    kinds = set()
    for _ in range(10_000):
        payload = bytearray(valid)
        for _ in range(draw.randrange(4)):
            place = draw.randrange(len(payload))
            new = msgspec.msgpack.encode(anything(draw)) if draw.random() < 0.5 else draw.randbytes(2)
            payload[place : place + draw.randrange(3)] = new
        kinds.add(type(unpack_from_replica(bytes(payload), MAX)))
    assert kinds == {Unreadable, Done}


def test_nothing_of_an_expelled_replica_arrives_any_more_and_its_dialer_ends() -> None:
    with connected() as (listener, dialer, peer), raw_client(listener.connection) as client:
        client.send(READY)
        ((hostile, _),) = taken(listener, 1)
        dialer.send(Ready(2))
        client.send(READY)
        until(lambda: listener._inbox._bytes > 1000)  # both arrived, and were not taken yet
        listener.send(peer, Stop("refused"))
        listener.expel(peer)
        listener.expel(hostile)
        assert listener.take(0.1) == []
        client.send(READY)
        assert listener.take(0.1) == []
        assert listener.silence(peer) == math.inf and not listener.send(peer, Announce(1))
        assert taken(dialer, 1) == [Stop("refused")]  # queued before
        until(lambda: bool(dialer.ended))
        assert "the trainer does not accept more messages of this replica" in dialer.ended
        still_serves(listener)


def test_a_client_cannot_take_the_place_of_another() -> None:
    with connected() as (listener, dialer, peer), raw_client(listener.connection, routing_id=peer) as client:
        client.send(READY)
        assert listener.take(0.3) == []
        listener.send(peer, Announce(4))
        assert taken(dialer, 1) == [Announce(4)]


def test_a_flood_does_not_fill_the_memory_and_others_are_still_served() -> None:
    with listening(inbox_bytes=4 * 2**20) as listener, dialing(listener) as dialer:
        dialer.send(Ready(0))
        ((peer, _),) = taken(listener, 1)
        before, payload = resident(), pack(Leaving("x" * 100_000), MAX)
        forever = "while True: socket.send(payload)"  # 1 GB takes about 2 s
        with replica_process(listener.connection, payload, forever):
            until(lambda: listener._inbox.full)
            until(lambda: listener.silence(peer) == listener.silence(peer))  # nothing is read: not silence
            silence = listener.silence(peer)
            time.sleep(1.0)
            assert resident() - before < 64 * 2**20
            assert listener.silence(peer) == silence
            found = []
            for version in range(5):
                dialer.send(Ready(version))
            until(lambda: found.extend(listener.take(1.0)) or ready(found, peer) == 5)
            flooder = next(other for other, _ in found if other != peer)
            assert resident() - before < 64 * 2**20
            listener.expel(flooder)
            dialer.send(Alive())
            assert taken(listener, 1) == [(peer, Alive())]


def test_there_is_a_bound_on_connected_replicas(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listener_file, "MOST_PEERS", 1)
    with connected() as (listener, dialer, peer), raw_client(listener.connection) as client:
        for _ in range(3):
            client.send(READY)
        assert listener.take(0.3) == []
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        dialer.send(Ready(2))
        assert taken(listener, 1) == [(peer, Ready(2))]


def anything(draw: random.Random) -> object:
    """Return any value that msgpack has, at random."""
    inner = draw.randrange(4)
    return draw.choice(
        [
            lambda: draw.choice((None, True, 2**64 - 1, -(2**63), math.nan, math.inf, "", "\ud7ff", b"\xff")),
            lambda: [anything(draw) for _ in range(inner)],
            lambda: {draw.choice((1, "k", None, 1.5, b"k", (1, 2))): anything(draw) for _ in range(inner)},
            lambda: msgspec.msgpack.Ext(draw.randrange(-128, 128), draw.randbytes(inner)),
        ]
    )()


def ready(found: list[tuple[bytes, object]], peer: bytes) -> int:
    return sum(other == peer for other, _ in found)


def still_serves(listener: Listener) -> None:
    with dialing(listener) as dialer:
        dialer.send(Ready(77))
        assert [message for _, message in taken(listener, 1)] == [Ready(77)]


def where(listener: Listener) -> tuple[str, int]:
    host, port = listener.connection.address.removeprefix("tcp://").rsplit(":", 1)
    return host, int(port)


def resident() -> int:
    """Return the memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def suppressed() -> Iterator[None]:
    """Ignore that the other side has closed the connection."""
    try:
        yield
    except (ConnectionResetError, BrokenPipeError):
        pass


@contextmanager
def recording(to: tuple[str, int]) -> Iterator[tuple[int, tuple[list[bytes], list[bytes]]]]:
    """Yield the port of a TCP proxy for one connection, and the bytes that went there and back."""
    recorded: tuple[list[bytes], list[bytes]] = ([], [])

    def copy(source: socket.socket, target: socket.socket, into: list[bytes]) -> None:
        with suppressed():
            while part := source.recv(65_536):
                into.append(part)
                target.sendall(part)

    def serve() -> None:
        client, _ = server.accept()
        with client, socket.create_connection(to) as upstream:
            back = threading.Thread(target=copy, args=(upstream, client, recorded[1]))
            back.start()
            copy(client, upstream, recorded[0])
            upstream.shutdown(socket.SHUT_RDWR)
            back.join()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1], recorded
        thread.join(10)
        assert not thread.is_alive()
