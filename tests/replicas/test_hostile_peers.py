"""What an attacker on the network, or a replica that is not what it says, can do to the trainer's socket.

The attackers of the first tests can reach the port, and read and send packets, but have no key. Those of the
later tests have the keys of the connection file.
"""

from __future__ import annotations

import math
import os
import random
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import psutil
import pytest

from megatron_stppo.base.types import Task, Trajectory
from megatron_stppo.replicas.wire import channel as channel_file
from megatron_stppo.replicas.wire import ends as listener_file
from megatron_stppo.replicas.wire.channel import LENGTH, NONCE, PROOF, Channel, authenticate
from megatron_stppo.replicas.wire.ends import Dialer, Listener
from megatron_stppo.replicas.wire.keys import Connection
from megatron_stppo.replicas.wire.measure import Counters
from megatron_stppo.replicas.wire.messages import (
    Alive,
    Announce,
    Done,
    Ready,
    ReplicaEnds,
    Stop,
    pack,
    unpack_from_replica,
)
from tests.replicas.peers import (
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

suppressed = partial(suppress, ConnectionResetError, BrokenPipeError)  # the other side has closed it

# ---- without a key


def test_a_client_with_another_key_is_refused_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """The key of an earlier attempt is such a key, too."""
    with listening() as earlier, listening() as listener:
        other = replace(listener.connection, key=earlier.connection.key)
        for _ in range(3):
            with closing(Dialer(other, MAX)) as dialer:
                assert not dialer.send(Ready(1)) and dialer.silence == math.inf
                assert "or does not accept its key" in dialer.ended
        assert listener.take(0.1) == []
        assert [record.getMessage() for record in caplog.records] == [
            "refused a client at 127.0.0.1, which does not have the key of this attempt"
        ]
        still_serves(listener)


@pytest.mark.parametrize("is_reflected", [False, True], ids=["any proof", "the replica's own proof"])
def test_a_replica_refuses_a_trainer_that_does_not_have_the_key_and_sends_it_nothing(
    is_reflected: bool,
) -> None:
    received: list[bytes] = []

    def impostor() -> None:
        client, _ = server.accept()
        with client, suppressed():
            client.sendall(bytes(NONCE))
            proof = client.recv(NONCE + PROOF, socket.MSG_WAITALL)[NONCE:]
            client.sendall(proof if is_reflected else bytes(PROOF))
            received.append(client.recv(1000))

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=impostor)
        thread.start()
        dialer = Dialer(Connection("127.0.0.1", server.getsockname()[1], "5e" * 32), MAX)
        assert "is not the trainer of this connection file" in dialer.ended
        assert not dialer.send(Ready(1))
        thread.join(30)
    assert received == [b""]


def test_strangers_are_few_and_their_time_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_file, "MOST_STRANGERS", 2)
    monkeypatch.setattr(channel_file, "HANDSHAKE", 0.5)
    with listening() as listener, ExitStack() as stack:
        connect = partial(socket.create_connection, where(listener), timeout=30)
        silent = [stack.enter_context(connect()) for _ in range(4)]
        answers = [client.recv(100) for client in silent]
        assert sorted(map(len, answers)) == [0, 0, NONCE, NONCE], "two were refused at once"
        assert [client.recv(100) for client in silent] == [b""] * 4, "and two after half a second"
        still_serves(listener)


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nHost: trainer\r\n\r\n",
        b"\0" * 100_000,
        b"\xff" * 100_000,
        random.Random(1).randbytes(100_000),
    ],
    ids=["http", "zeros", "ones", "random"],
)
def test_other_protocols_and_garbage_on_the_port_do_no_harm(sent: bytes) -> None:
    with listening() as listener:
        for _ in range(3):
            with socket.create_connection(where(listener)) as attacker, suppressed():
                attacker.sendall(sent)
        still_serves(listener)
        assert listener.take(0.0) == []


def test_recorded_packets_cannot_be_sent_again() -> None:
    """A proxy records the bytes of a whole connection, and sends them over two others."""
    with listening() as listener:
        with recording(where(listener)) as (port, recorded):
            with closing(Dialer(replace(listener.connection, port=port), MAX)) as dialer:
                dialer.send(ReplicaEnds("left", "why"))
                ((peer, _),) = taken(listener, 1)
                listener.send(peer, Stop("why"))
                assert taken(dialer, 1) == [Stop("why")]
        there, back = (b"".join(parts) for parts in recorded)
        assert b"ReplicaEnds" in there and b"Stop" in back
        assert bytes.fromhex(listener.connection.key) not in there + back
        for bytes_again in (there, there + there):
            with socket.create_connection(where(listener)) as attacker, suppressed():
                attacker.sendall(bytes_again)
                attacker.settimeout(5)
                while attacker.recv(4096):
                    pass
        assert listener.take(0.1) == []
        still_serves(listener)


@pytest.mark.parametrize("change", ["changed", "repeated", "left out"])
def test_a_message_that_is_changed_repeated_or_left_out_on_the_way_ends_the_connection(change: str) -> None:
    with listening() as listener, socket.create_connection(where(listener)) as client:
        codes, _ = authenticate(client, bytes.fromhex(listener.connection.key), is_trainer=False)
        one, two = (
            LENGTH.pack(len(payload)) + codes.next(payload) + payload
            for payload in (pack(Ready(1), MAX), pack(Ready(2), MAX))
        )
        sent = {"changed": one + two[:-1] + b"\x07", "repeated": one + one, "left out": two}[change]
        client.sendall(sent)
        with suppressed():
            until(lambda: not client.recv(4096))  # signs of life, and then the end
        assert [message for _, message in listener.take(0.1)] == ([] if change == "left out" else [Ready(1)])


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
    with connected() as (listener, dialer, peer), raw_client(listener.connection) as send, suppressed():
        send(b"x" * (MAX + 1))
        assert listener.take(0.3) == []
        dialer.send(Ready(2))
        assert taken(listener, 1) == [(peer, Ready(2))]


@pytest.mark.parametrize("payload", [b"\xc1 not msgpack", b"\0", pack(Stop("of the trainer"), MAX)])
def test_a_message_that_cannot_be_used_ends_its_connection_and_is_reported_once(
    payload: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with listening() as listener, raw_client(listener.connection) as send, suppressed():
        send(payload)
        until(lambda: listener.take(0.1) or caplog.records)
        send(READY)
        assert listener.take(0.1) == []
        with pytest.raises(ValueError) as why:
            unpack_from_replica(payload)
        assert [record.getMessage() for record in caplog.records] == [
            f"replica 1 is expelled for a message: {why.value}"
        ]


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (pack(Stop("x"), MAX), "Invalid value 'Stop' - at `$.type`"),
        (msgspec.msgpack.encode({"type": "Ready", "version": 1, "more": 2}), "unknown field `more`"),
        (msgspec.msgpack.encode({"type": "Ready", "version": "1"}), "Expected `int`, got `str`"),
        (msgspec.msgpack.encode({"type": "\x1b[2J\u202e\n"}), "Invalid value"),
        (msgspec.msgpack.encode({"type": "ReplicaEnds", "text": b"\xff"}), "Expected `str`, got `bytes`"),
        (b"\x82\xa4type\xabReplicaEnds\xa4text\xa1\xff", ""),  # not UTF-8
        (b"\x91" * 900_000, ""),  # 900,000 lists, one in the other
    ],
)
def test_the_reason_names_what_is_wrong_in_one_printable_line(payload: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)) as found:
        unpack_from_replica(payload)
    assert str(found.value).isprintable() and len(str(found.value)) <= 200


def test_no_payload_raises_anything_but_a_value_error() -> None:
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
        try:
            kinds.add(type(unpack_from_replica(bytes(payload))))
        except ValueError as error:
            kinds.add(type(error))
    assert kinds == {ValueError, Done}


def test_nothing_of_an_expelled_replica_arrives_any_more_and_its_dialer_ends() -> None:
    with connected() as (listener, dialer, peer), raw_client(listener.connection) as send, suppressed():
        send(READY)
        ((hostile, _),) = taken(listener, 1)
        dialer.send(Ready(2))
        send(READY)
        until(lambda: listener._inbox._bytes > 1000)  # both arrived, and were not taken yet
        listener.send(peer, Stop("refused"))
        listener.expel(peer)
        listener.expel(hostile)
        assert listener.take(0.1) == []
        assert peer.silence == math.inf and not listener.send(peer, Announce(1))
        assert taken(dialer, 1) == [Stop("refused")]  # queued before
        until(lambda: dialer.ended)
        still_serves(listener)
        send(READY)
        assert listener.take(0.1) == []


def test_a_flood_does_not_fill_the_memory_and_others_are_still_served() -> None:
    with listening(inbox_bytes=4 * 2**20) as listener, dialing(listener) as dialer:
        dialer.send(Ready(0))
        ((peer, _),) = taken(listener, 1)
        before, payload = resident(), pack(ReplicaEnds("left", "x" * 100_000), MAX)
        forever = "while True: send(payload)"  # 1 GB takes about 2 s
        with replica_process(listener.connection, payload, forever):
            until(lambda: listener._inbox._bytes >= 4 * 2**20)
            dialer.send(Ready(0))
            until(lambda: peer.silence == 0.0)  # nothing is read: not silence
            time.sleep(1.0)
            assert resident() - before < 64 * 2**20
            assert peer.silence == 0.0
            found = []
            for version in range(1, 5):
                dialer.send(Ready(version))
            until(lambda: found.extend(listener.take(1.0)) or ready(found, peer) == 5)
            flooder = next(other for other, _ in found if other != peer)
            assert resident() - before < 64 * 2**20
            listener.expel(flooder)
            dialer.send(Alive(Counters()))
            assert taken(listener, 1) == [(peer, Alive(Counters()))]


def test_there_is_a_bound_on_connected_replicas(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listener_file, "MOST_PEERS", 1)
    with connected() as (listener, dialer, peer):
        for _ in range(3):
            assert Dialer(listener.connection, MAX).ended
        assert ["too many are connected" in record.getMessage() for record in caplog.records] == [True]
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


def ready(found: list[tuple[Channel, object]], peer: Channel) -> int:
    return sum(other == peer for other, _ in found)


def still_serves(listener: Listener) -> None:
    with dialing(listener) as dialer:
        dialer.send(Ready(77))
        assert [message for _, message in taken(listener, 1)] == [Ready(77)]


def where(listener: Listener) -> tuple[str, int]:
    return listener.connection.host, listener.connection.port


def resident() -> int:
    """Return the memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


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
