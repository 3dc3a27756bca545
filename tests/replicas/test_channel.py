"""Messages between a Listener and Dialers over real sockets: order, signs of life, lost peers, closing."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_stppo.base.types import Task, Trajectory, Turn
from megatron_stppo.config import (
    AlgorithmConfig,
    Config,
    ConfigError,
    EnvironmentConfig,
    ModelConfig,
    RolloutConfig,
)
from megatron_stppo.replicas.wire.ends import Dialer, Listener
from megatron_stppo.replicas.wire.measure import Counters
from megatron_stppo.replicas.wire.messages import (
    Alive,
    Announce,
    Assignment,
    Done,
    Play,
    Ready,
    ReplicaEnds,
    Stop,
    limit_of,
    message_limit,
    pack,
)
from megatron_stppo.weights.sharding.hf_names import ModelShape
from tests.replicas.peers import (
    MAX,
    connected,
    dialing,
    first_of,
    listening,
    quick,
    replica_process,
    seconds,
    taken,
    until,
)


def test_messages_arrive_complete_and_in_order_in_both_directions() -> None:
    with connected() as (listener, dialer, peer):
        for version in range(1000):
            assert dialer.send(Ready(version))
        assert [message.version for _, message in taken(listener, 1000)] == list(range(1000))
        episode = Assignment(7, Task("t", (), ("ä",), "train", 3, {"k": [1]}), 3, 11, 7, 1.0, 0.9)
        sent = [Play((episode,)), *(Announce(version) for version in range(500)), Stop("end")]
        for message in sent:
            assert listener.send(peer, message)
        assert taken(dialer, 502) == sent


def test_each_peer_gets_its_own_messages() -> None:
    with listening() as listener, dialing(listener) as first, dialing(listener) as second:
        first.send(Ready(1))
        ((one, _),) = taken(listener, 1)
        second.send(Ready(2))
        ((two, _),) = taken(listener, 1)
        listener.send(two, Announce(2))
        listener.send(one, Announce(1))
        assert taken(first, 1) == [Announce(1)] and taken(second, 1) == [Announce(2)]


def test_take_waits_for_a_message_and_returns_early_when_another_thread_wakes_it() -> None:
    with connected() as (listener, dialer, _):
        for side in (listener, dialer):
            began = time.monotonic()
            assert side.take(0.1) == []
            assert time.monotonic() - began >= 0.1
            threading.Timer(0.1, side.wake).start()
            began = time.monotonic()
            assert side.take(60.0) == []
            assert time.monotonic() - began < 30
            side.wake()
            assert side.take(60.0) == []  # the call is not lost if nobody waits


def test_both_sides_send_signs_of_life_without_being_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)
    with connected(Counters(steps=3)) as (listener, dialer, peer):
        assert first_of(listener, 2)[:2] == [(peer, Alive(Counters(steps=3)))] * 2
        for _ in range(2):
            until(lambda: dialer.silence > 0.05)
            until(lambda: dialer.silence < 0.05)  # another one has arrived
        assert dialer.take(0.0) == []  # the trainer's are not messages for the caller


def test_a_process_that_hangs_is_noticed_by_its_silence_and_one_that_is_killed_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quick(monkeypatch)
    with listening() as listener, replica_process(listener.connection) as process:
        peer, _ = first_of(listener, 1)[0]
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: 0.5 < peer.silence < math.inf)
        os.kill(process.pid, signal.SIGKILL)
        until(lambda: peer.silence == math.inf)
        assert not listener.send(peer, Announce(1))


def test_a_replica_learns_that_the_trainer_has_ended_and_still_gets_its_last_messages() -> None:
    with listening() as listener, dialing(listener) as dialer:
        dialer.send(Ready(1))
        ((peer, _),) = taken(listener, 1)
        for version in range(100):
            listener.send(peer, Announce(version))
        listener.close()
        assert taken(dialer, 100) == [Announce(version) for version in range(100)]
        until(lambda: bool(dialer.ended))
        assert "the trainer has ended" in dialer.ended and dialer.silence == math.inf
        assert not dialer.send(Ready(2)) and dialer.take(60.0) == []


def test_a_replica_learns_at_once_that_nobody_listens() -> None:
    with listening() as listener:
        connection = listener.connection
    dialer = Dialer(connection, MAX)
    until(lambda: bool(dialer.ended))
    assert dialer.ended == f"{connection.address}: nothing listens there"
    dialer.close()


def test_messages_are_delivered_before_closing_on_both_sides() -> None:
    with listening() as listener:
        dialer = Dialer(listener.connection, MAX)
        for version in range(100):
            dialer.send(Ready(version))
        dialer.send(ReplicaEnds("left", "SIGTERM"))
        dialer.close()
        assert [message for _, message in taken(listener, 101)][-1] == ReplicaEnds("left", "SIGTERM")


def test_closing_never_hangs_with_a_dead_peer_and_unsent_messages() -> None:
    with listening() as listener, replica_process(listener.connection) as process:
        peer, _ = first_of(listener, 1)[0]
        os.kill(process.pid, signal.SIGSTOP)
        for _ in range(100):
            listener.send(peer, Stop("x" * (MAX // 2)))  # more than TCP's buffers
        assert seconds(listener.close) < 10
        assert seconds(listener.close) < 0.1  # a second time
        assert not listener.send(peer, Stop("x")) and listener.take(60.0) == []
        os.kill(process.pid, signal.SIGKILL)
    with listening(inbox_bytes=1) as listener, dialing(listener) as dialer:
        for _ in range(100):
            dialer.send(ReplicaEnds("left", "x" * (MAX // 2)))
        assert seconds(dialer.close) < 10
        assert not dialer.send(Ready(1)) and dialer.take(60.0) == []


def test_a_message_that_is_too_long_is_refused_where_it_is_sent() -> None:
    with connected() as (listener, dialer, peer):
        with pytest.raises(ValueError, match=r"ReplicaEnds of 104.... bytes exceeds the limit of 1048576"):
            dialer.send(ReplicaEnds("left", "x" * MAX))
        with pytest.raises(ValueError, match="Stop of"):
            listener.send(peer, Stop("x" * MAX))
        most = ReplicaEnds("left", "x" * (MAX - len(pack(ReplicaEnds("left", ""), MAX)) - 4))
        dialer.send(most)
        assert taken(listener, 1) == [(peer, most)]  # exactly MAX bytes


def test_the_limit_holds_every_trajectory_of_the_context() -> None:
    """Ids of 5 bytes, a version per token, 8 bytes of experts; the limit has 4 MiB more for the task."""
    n = 1000
    versions = tuple((2**31 + token, 1) for token in range(n))
    turn = Turn((2**31,) * n, (-1e-300,) * n, (), -1e-300, versions)
    played = Trajectory(Task("t", (), ("a",), "train", 0), (), (turn,), "ok", routes=bytes(8 * n))
    pack(Done(2**62, played), message_limit(n, 8) - 4 * 2**20)


def test_the_limit_of_a_run_holds_an_agents_histories_and_their_experts() -> None:
    """94 layers with 8 of 128 experts take 752 bytes per token. The least limit is 64 MiB."""
    shape = ModelShape(
        *("qwen3_moe", 94, 4096, 64, 4, 128, 1536, 151936, False, 1e6, 1e-6, 2**17, None, 128, 8)
    )

    def config(context: int, turns: int, routes: str = "off") -> Config:
        return Config(
            model=ModelConfig(path=Path("model")),
            rollout=RolloutConfig(max_context=context),
            environment=EnvironmentConfig(kind="agent", agent="mine:play", max_turns=turns),
            algorithm=AlgorithmConfig(routing_replay=routes),
        )

    assert limit_of(config(1000, 3), shape) == 2**26
    assert limit_of(config(90_000, 50), shape) == 50 * 90_000 * 32 + 2**22
    routed = config(90_000, 50, "rollout")
    assert limit_of(routed, shape) == 50 * 90_000 * (32 + 752) + 2**22
    alone = routed.model_copy(update={"environment": EnvironmentConfig(max_turns=50)})
    assert limit_of(alone, shape) == 90_000 * (32 + 752) + 2**22, "one history"
    many = replace(shape, experts=256)
    assert limit_of(routed, many) == 50 * 90_000 * (32 + 4 * 752) + 2**22, "numbers of 4 bytes"


def test_a_failure_of_the_callers_function_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)

    def broken() -> Counters:
        raise KeyError("counters")

    failures: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda failure: failures.append(failure.exc_type))
    with listening() as listener, dialing(listener, broken) as dialer:
        dialer.send(Ready(1))
        until(lambda: dialer.ended and failures)  # the thread reports its failure last
        assert failures == [KeyError] and not dialer.send(Ready(2)) and dialer.take(60.0) == []


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "*", "", "203.0.113.77", "no such host\x1b[2J", "a b"])
def test_the_address_must_be_of_one_interface_of_this_machine(address: str) -> None:
    with pytest.raises(ConfigError, match=r"^serving\.address=.*; give (an|the) address") as error:
        Listener(address, MAX)
    assert str(error.value).isprintable()


def test_every_listener_has_a_key_of_its_own() -> None:
    with listening() as first, listening() as second:
        assert first.connection.key != second.connection.key
