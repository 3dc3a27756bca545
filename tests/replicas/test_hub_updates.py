"""The hub when new weights are sent: waiting for episodes, announcing, and replicas that join meanwhile."""

from __future__ import annotations

import threading

import pytest

from megatron_stppo.base.errors import EngineLost, ToolsStayAway
from megatron_stppo.replicas.trainer import hub
from megatron_stppo.replicas.trainer.crew import Crew
from megatron_stppo.replicas.wire.messages import (
    Announce,
    Give,
    Moved,
    Play,
    Ready,
    Receive,
    ReplicaEnds,
    Stop,
)
from tests.replicas.hubs import hello, played, trainer
from tests.replicas.peers import until


def test_the_hub_is_settled_when_all_admitted_episodes_have_finished() -> None:
    with trainer(staleness=1) as (t, connect):
        a = connect("a")
        assert t.hub.settled() is True, "none is admitted"
        t.hub.admit(0)
        assert t.hub.settled() is None
        for number in a.given():
            a.finish(number)
        assert t.hub.wait(t.hub.settled) is True
        t.hub.wait(t.hub.batch)
        assert t.hub.settled() is True, "the second batch has finished"


def test_replicas_that_join_while_the_trainer_waits_for_episodes_get_the_version_of_these() -> None:
    """The trainer waits for 4 episodes of version 0, of which replica a plays one at a time. Replica b gets
    version 0 from a. When both are lost, c gets version 1, and plays the episodes that are left."""
    with trainer() as (t, connect):
        a, b, c = connect("a", capacity=1), connect(), connect()
        t.hub.admit(0)
        assert a.given() == [0]
        b.dialer.send(hello("b", capacity=1))
        message = b.next(Receive)
        assert (message.version, message.route.source, a.next(Give)) == (0, 1, Give(message.route, 0))
        a.dialer.send(Moved(message.route.name, 0))
        b.dialer.send(Moved(message.route.name, 0))
        assert b.given() == [1]
        a.dialer.close()
        b.dialer.close()
        until(lambda: t.crew.lost == 2)
        c.dialer.send(hello("c"))
        until(lambda: "c" in t.names())
        message = t.hub.wait(t.hub.settled, version=1)
        assert message.version == 1 and c.next(Receive) == message
        c.dialer.send(Moved(message.route.name, 1))
        assert sorted(c.given()) == [0, 1, 2, 3]
        for number in (0, 1, 2, 3):
            c.finish(number, turns=played(number, version=1).turns)
        assert t.hub.wait(t.hub.settled, version=1) is True


def test_a_run_that_ends_while_it_waits_for_episodes_plays_them_again_with_the_next_version() -> None:
    """Iteration 0 has trained on the episodes 0 and 1. Its checkpoint has 2, of version 0, but not 3."""
    asked: list[str] = []
    with trainer(notice=lambda: "".join(asked)) as (t, connect):
        a = connect("a")
        t.hub.admit(0)
        for number in a.given()[:3]:
            a.finish(number)
        t.hub.wait(t.hub.batch)
        until(lambda: t.ledger.ready == 1)
        asked.append("SIGTERM")
        a.dialer.send(ReplicaEnds("left", "SIGTERM"))
        with pytest.raises(EngineLost, match=r"^SIGTERM, and no replica serves any more$"):
            t.hub.wait(t.hub.settled)
        state, (kept, _) = {"iteration": 1} | t.hub.ask(lambda crew: crew.ledger.state()), t.hub.kept()
    with trainer(version=1) as (t, connect):
        t.ledger.restore(state, kept)
        b = connect("b")
        t.hub.all_serve(1, lambda *_: None)
        assert b.given() == [3]
        b.finish(3, turns=played(3, version=1).turns)
        batch = t.hub.wait(t.hub.batch)
        assert [trajectory.turns[0].policy_version for trajectory in batch] == [0, 1]


def test_the_trainer_sends_once_and_replicas_pass_the_weights_on() -> None:
    with trainer() as (t, connect):
        replicas = [connect() for _ in range(4)]
        for replica, name in zip(replicas, "abcd", strict=True):
            t.join(replica, name)
        t.hub.announce(1)
        sent = [t.update(replicas[0], 1)]
        for replica in replicas[1:]:
            replica.dialer.send(Ready(1))
        replicas[0].dialer.send(Moved(sent[0].route.name, 1))
        for replica in replicas[1:]:
            sent.append(replica.next(Receive))
            replica.dialer.send(Moved(sent[-1].route.name, 1))
            t.gave(sent[-1])
        assert t.hub.wait(t.hub.is_spread) is True
        trainers = [not isinstance(message.route.source, int) for message in sent]
        assert trainers == [True, False, False, False]
        assert t.hub.ask(Crew.numbers)["update_seconds"] > 0


def test_an_episode_begins_with_the_version_that_was_announced_when_it_was_admitted() -> None:
    with trainer() as (t, connect):
        a = connect("a")
        t.hub.admit(0)
        assert {episode.version for episode in a.next(Play).episodes} == {0}
        t.hub.announce(1)
        for number in range(2):
            a.finish(number)
        t.hub.wait(t.hub.batch)
        t.hub.admit(1)
        assert {episode.version for episode in a.next(Play).episodes} == {1}, "although it has version 0"


def test_a_replica_that_is_lost_in_a_transfer_costs_only_its_own_update() -> None:
    """b dies while a sends to it: a then sends to c. c is told the same version again after a has died."""
    with trainer() as (t, connect):
        a, b, c = connect(), connect(), connect()
        for replica, name in ((a, "a"), (b, "b"), (c, "c")):
            t.join(replica, name)
        t.hub.announce(1)
        first = t.update(a, 1)
        a.dialer.send(Moved(first.route.name, 1))
        b.dialer.send(Ready(1))
        to_b = b.next(Receive)
        c.dialer.send(Ready(1))
        b.dialer.close()
        until(lambda: t.crew.lost == 1)
        a.dialer.send(Moved(to_b.route.name, 1, "b is lost"))
        to_c = c.next(Receive)
        assert to_c.route.source == 1 and to_c.route.name != to_b.route.name
        a.dialer.close()
        until(lambda: t.crew.lost == 2)
        c.dialer.send(Moved(to_c.route.name, 1, "a is lost"))
        again = t.hub.wait(lambda: None)
        assert again.version == 1 and not isinstance(again.route.source, int), "the trainer sends again"
        assert c.next(Receive) == again and t.crew.joined == 1


def test_a_replica_whose_transfers_fail_again_and_again_is_expelled() -> None:
    with trainer() as (t, connect):
        a, b = connect("a"), connect()
        b.dialer.send(hello("b"))
        for _ in range(3):
            message = b.next(Receive)
            a.dialer.send(Moved(message.route.name, 0, "a row has changed"))
            b.dialer.send(Moved(message.route.name, 0, "a row has changed"))
        until(lambda: t.crew.lost == 2)  # either may be the one that is broken


def test_the_thread_that_sends_ends_when_no_replica_is_left_to_which_the_trainer_has_sent() -> None:
    with trainer() as (t, connect):
        a, b = connect("a"), connect("b")
        t.hub.announce(1, apart=True)
        assert t.hub.next_to_send(0.0, 1) is True and t.hub.sends_apart, "a is not ready"
        b.dialer.send(Ready(1))
        assert t.hub.next_to_send(0.3, 1) is True, "the trainer has sent nothing to b"
        a.dialer.close()
        until(lambda: t.crew.lost == 1)
        assert t.hub.next_to_send(30.0, 1) is False and not t.hub.sends_apart
        message = t.hub.wait(lambda: None)
        assert b.next(Receive) == message and not isinstance(message.route.source, int)


def test_an_update_leaves_it_to_the_next_wait_to_end_the_run() -> None:
    with trainer() as (t, connect):
        a = connect("a")
        t.hub.announce(1, apart=True)
        a.dialer.send(ReplicaEnds("away", "tools did not answer"))
        assert t.hub.next_to_send(30.0, 1) is False
        with pytest.raises(ToolsStayAway, match="tools did not answer"):
            t.hub.wait(t.hub.batch)


def test_a_replica_may_finish_an_episode_at_the_new_version_before_the_trainer_has_left_the_update() -> None:
    with trainer() as (t, connect):
        a = connect("a")
        t.hub.admit(0)
        a.given()
        t.hub.announce(1)
        t.update(a, 1)
        for number in (0, 1):
            a.finish(number, turns=played(number, version=1).turns)
        assert t.hub.wait(t.hub.batch) is not None and t.crew.lost == 0


def test_a_replica_that_keeps_others_waiting_is_not_waited_for() -> None:
    with trainer() as (t, connect):
        connect("a")
        b = connect("b")
        t.hub.announce(1, apart=True)
        b.dialer.send(Ready(1))
        assert t.hub.next_to_send(30.0, 1) is False and not t.hub.sends_apart
        message = t.hub.wait(lambda: None)
        assert b.next(Receive) == message


def test_a_replica_that_was_joining_when_a_version_was_announced_hears_of_it() -> None:
    with trainer() as (t, connect):
        connect("a")
        b = connect()
        b.dialer.send(hello("b"))
        message = b.next(Receive)
        t.hub.announce(1)
        b.dialer.send(Moved(message.route.name, 0))
        assert b.next(Announce) == Announce(1)


@pytest.mark.parametrize("sender", ["the trainer", "a replica"])
def test_a_run_that_ends_waits_for_transfers_in_progress_and_begins_no_others(sender: str) -> None:
    with trainer() as (t, connect):
        a, b = connect("a"), connect("b")
        t.hub.announce(1, apart=True)
        a.dialer.send(Ready(1))
        message = t.hub.next_to_send(30.0, 1)
        assert a.next(Receive) == message
        if sender == "a replica":
            a.dialer.send(Moved(message.route.name, 1))
            b.dialer.send(Ready(1))
            message = b.next(Receive)
        ends = threading.Thread(target=t.hub.end_transfers)
        ends.start()
        ends.join(0.5)
        assert ends.is_alive()
        b.dialer.send(Ready(1))
        until(lambda: t.crew.tree.nodes["member-2"].ready == 1)
        for replica in (a,) if sender == "the trainer" else (b, a):
            replica.dialer.send(Moved(message.route.name, 1))
        ends.join(30)
        assert not ends.is_alive() and t.hub.next_to_send(30.0, 1) is False
        t.hub.close("the run has ended")
        kinds = {type(message) for message in b.dialer.take(5.0)} - {Announce}
        assert kinds == {Stop} and t.crew.lost == 0


def test_the_thread_that_sends_ends_with_the_run_although_its_replica_is_not_ready() -> None:
    with trainer() as (t, connect):
        connect("a")
        t.hub.announce(1, apart=True)
        assert t.hub.next_to_send(0.0, 1) is True
        t.hub.end_transfers()
        assert t.hub.next_to_send(0.0, 1) is False


def test_a_run_that_is_asked_to_end_meanwhile_waits_for_transfers_for_a_short_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hub, "LEAVING", 0.1)
    with trainer() as (t, connect):
        a = connect("a")
        t.hub.announce(1, apart=True)
        a.dialer.send(Ready(1))
        assert t.hub.next_to_send(30.0, 1)
        ends = threading.Thread(target=t.hub.end_transfers, daemon=True)
        ends.start()
        ends.join(0.5)
        assert ends.is_alive()
        t.hub.must_end("SIGTERM")
        ends.join(10)
        assert not ends.is_alive()


def test_an_error_of_the_thread_that_sends_is_raised_by_the_next_wait() -> None:
    with trainer() as (t, connect):
        connect("a")
        t.hub.announce(1, apart=True)
        t.hub.fail(MemoryError("full"))
        with pytest.raises(MemoryError, match="full"):
            t.hub.wait(t.hub.batch)
