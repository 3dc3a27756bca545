"""The hub when new weights are sent: waiting for episodes, announcing, and replicas that join meanwhile."""

from __future__ import annotations

import pytest

from megatron_stppo.base.errors import EngineLost, ToolsStayAway
from megatron_stppo.replicas.wire.messages import Announce, Go, Ready, ReplicaEnds
from tests.replicas.hubs import played, trainer, until


def test_the_hub_is_settled_when_all_admitted_episodes_have_finished() -> None:
    with trainer(staleness=1) as (t, connect):
        a = connect()
        t.join(a, "a")
        assert t.hub.settled() is True, "none is admitted"
        t.hub.admit(0)
        assert t.hub.settled() is None
        for number in a.given():
            a.finish(number)
        assert t.hub.wait(t.hub.settled) is True
        t.hub.wait(t.hub.batch)
        assert t.hub.settled() is True, "the second batch has finished"


def test_a_replica_that_joins_with_the_new_version_gets_no_episode_of_an_older_one_that_serves() -> None:
    """The trainer waits for 4 episodes of version 0, of which replica a plays one at a time. Replica b joins
    with version 1. When a is lost, b plays the episodes that are left, and it is not updated again."""
    with trainer(completes=True) as (t, connect):
        a, b = connect(), connect()
        t.join(a, "a", capacity=1)
        t.hub.admit(0)
        assert a.given() == [0]
        t.join(b, "b", version=1, capacity=4)
        a.finish(0)
        assert a.given() == [1]
        assert t.queues() == {"episodes_waiting": 2, "episodes_playing": 1, "episodes_finished": 1}
        a.dialer.close()
        assert b.given() == [1, 2, 3]
        for number in (1, 2, 3):
            b.finish(number, turns=played(number, version=1).turns)
        assert t.hub.wait(t.hub.settled) is True
        t.hub.announce(1)
        assert t.hub.next_update(1) == ""


def test_a_run_that_ends_while_it_waits_for_episodes_plays_them_again_with_the_next_version() -> None:
    """Iteration 0 has trained on the episodes 0 and 1. Its checkpoint has 2, of version 0, but not 3."""
    asked: list[str] = []
    with trainer(completes=True, notice=lambda: "".join(asked)) as (t, connect):
        a = connect()
        t.join(a, "a")
        t.hub.admit(0)
        for number in a.given()[:3]:
            a.finish(number)
        t.hub.wait(t.hub.batch)
        until(lambda: t.ledger.ready == 1)
        asked.append("SIGTERM")
        a.dialer.send(ReplicaEnds("left", "SIGTERM"))
        with pytest.raises(EngineLost, match=r"^SIGTERM, and no replica serves any more$"):
            t.hub.wait(t.hub.settled)
        state, kept = {"iteration": 1} | t.hub.state(), t.hub.kept()
    with trainer(completes=True) as (t, connect):
        t.ledger.restore(state, kept)
        b = connect()
        t.join(b, "b", version=1)
        t.hub.all_serve(1, lambda *_: None)
        assert b.given() == [3]
        b.finish(3, turns=played(3, version=1).turns)
        batch = t.hub.wait(t.hub.batch)
        assert [trajectory.turns[0].policy_version for trajectory in batch] == [0, 1]


def test_only_replicas_with_another_version_are_updated() -> None:
    with trainer(completes=True) as (t, connect):
        a, b = connect(), connect()
        group = t.join(a, "a")
        t.join(b, "b", version=1)
        t.hub.announce(1)
        a.dialer.send(Ready(1))
        assert (t.hub.next_update(1), t.hub.next_update(1)) == (group, "")
        t.hub.admit(0)
        assert (a.given(), b.given()) == ([0, 1], [2, 3]), "both have version 1"


def test_an_update_waits_for_each_replica_and_skips_one_that_is_lost() -> None:
    with trainer() as (t, connect):
        a, b = connect(), connect()
        t.join(a, "a")
        group = t.join(b, "b")
        t.hub.announce(1)
        assert (a.next(Announce).version, b.next(Announce).version) == (1, 1)
        b.dialer.send(Ready(1))
        assert t.hub.next_update(1) == group and b.next(Go).version == 1
        a.dialer.close()
        assert t.hub.next_update(1) == ""


def test_an_update_leaves_it_to_the_next_wait_to_end_the_run() -> None:
    with trainer() as (t, connect):
        a = connect()
        t.join(a, "a")
        t.hub.announce(1)
        a.dialer.send(ReplicaEnds("away", "tools did not answer"))
        assert t.hub.next_update(1) == ""
        with pytest.raises(ToolsStayAway, match="tools did not answer"):
            t.hub.wait(t.hub.batch)


def test_a_replica_may_finish_an_episode_at_the_new_version_before_the_trainer_has_left_the_update() -> None:
    with trainer() as (t, connect):
        a = connect()
        t.join(a, "a")
        t.hub.admit(0)
        a.given()
        t.hub.announce(1)
        a.dialer.send(Ready(1))
        assert t.hub.next_update(1)
        for number in (0, 1):
            a.finish(number, turns=played(number, version=1).turns)
        assert t.hub.wait(t.hub.batch) is not None and t.crew.lost == 0
