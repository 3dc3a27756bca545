"""What unfinished episodes have played: kept for checkpoints, and given to other replicas."""

from __future__ import annotations

import threading

import pytest
from msgspec.structs import replace as replace_struct

from megatron_stppo.base.types import Turn
from megatron_stppo.replicas.wire.episodes import Unfinished, decode_episodes, encode_episodes
from megatron_stppo.replicas.wire.messages import (
    Assignment,
    Moved,
    Play,
    ReplicaEnds,
    TellUnfinished,
    ToldUnfinished,
)
from megatron_stppo.rollout.vllm.generation import RecordedHistory, RecordedTurn
from tests.replicas.hubs import SIZE, TASKS, hello, trainer
from tests.replicas.peers import until


def turn(tokens: int, version: int = 0, reason: str | None = None) -> RecordedTurn:
    return RecordedTurn((7,) * tokens, (-0.5,) * tokens, ((version, tokens),), reason)  # type: ignore[arg-type]


def record(number: int, *turns: RecordedTurn) -> Unfinished:
    return Unfinished.of(number, (RecordedHistory((1, 2), turns),))


def test_a_replica_that_leaves_hands_its_unfinished_episodes_to_another_one() -> None:
    with trainer() as (t, connect):
        a, b = connect("a"), connect()
        t.hub.admit(0)
        a.given()
        told = record(1, turn(3, reason="stop"), turn(2))
        a.dialer.send(told)
        a.dialer.send(ReplicaEnds("left", "SIGTERM"))
        until(lambda: t.crew.lost == 1)
        t.hub.announce(1)
        b.dialer.send(hello("b"))
        message = t.hub.wait(lambda: None)
        b.dialer.send(Moved(message.route.name, 1))
        given = {episode.number: episode for episode in b.next(Play).episodes}
        assert given[1].record == told.record and given[0].record == ()
        more = record(1, turn(3, reason="stop"), turn(4, version=1))  # b never had version 0
        b.dialer.send(more)
        until(lambda: t.crew.records.get(1) == more.record)
        b.finish(1, turns=(Turn((7,) * 3, (-0.5,) * 3, (), 0.0, ((0, 3),)),))
        b.finish(0, turns=(Turn((7,) * 3, (-0.5,) * 3, (), 0.0, ((0, 3),)),))
        until(lambda: t.crew.lost == 2)  # version 0 is in the record of 1 only
        assert t.ledger.ready == 1


def test_a_checkpoint_asks_for_the_records_and_a_resumed_run_continues_those_that_are_not_too_old() -> None:
    with trainer() as (t, connect):
        a = connect("a")
        t.hub.admit(0)
        a.given()
        a.finish(0)
        until(lambda: t.ledger.ready == 1)
        asked = threading.Thread(target=t.hub.record, args=(30.0,))
        asked.start()
        number = a.next(TellUnfinished).number
        for told in (record(1, turn(3)), record(2, turn(1, reason="end"), turn(2)), record(3, turn(4))):
            a.dialer.send(told)
        a.finish(3)
        a.dialer.send(ToldUnfinished(number))
        asked.join(30)
        assert not asked.is_alive()
        content = encode_episodes(*t.hub.kept())
        state = {"iteration": 0} | t.hub.ask(lambda crew: crew.ledger.state())
    finished, unfinished = decode_episodes(content)
    assert [one.number for one in finished] == [0, 3]
    assert unfinished == [record(1, turn(3)), record(2, turn(1, reason="end"), turn(2))]
    with trainer() as (t, connect):
        t.ledger.restore(state, finished)
        t.hub.recall([*unfinished, record(3, turn(1)), record(9, turn(1))])
        b = connect("b")
        t.hub.all_serve(1, lambda *_: None)
        given = {episode.number: episode.record for episode in b.next(Play).episodes}
        assert given == {one.number: one.record for one in unfinished}
    with trainer(staleness=0) as (t, connect):
        t.ledger.restore(state | {"iteration": 1}, [])
        t.hub.recall(unfinished)
        assert not list(t.crew.records), "tokens of version 0 are too old for iteration 1"


@pytest.mark.parametrize(
    "number, turns, why",
    [
        (17, (turn(1),), "was not given"),
        (0, (turn(1, version=3),), "version 3"),
        (0, (RecordedTurn((100,), (-0.5,), ((0, 1),)),), "token"),
        (0, (turn(1), turn(1)), "not complete before another"),
        (0, (RecordedTurn((7,), (0.5,), ((0, 1),)),), "above 0"),
        (0, (RecordedTurn((7,), (), ((0, 1),)),), "0 log-probs of 1 tokens"),
        (0, (RecordedTurn((7,), (-0.5,), ((0, 2),)),), "versions"),
        (0, (turn(70),), "64"),
        (0, (), "no turns"),
    ],
)
def test_a_replica_that_records_what_cannot_be_is_expelled(number: int, turns, why: str, caplog) -> None:
    with trainer() as (t, connect):
        a = connect("a")
        t.hub.admit(0)
        a.given()
        a.dialer.send(record(number, *turns))
        until(lambda: t.crew.lost == 1)
        assert why in caplog.text and not list(t.crew.records)


def test_an_episode_is_continued_with_its_newest_version_or_a_later_one() -> None:
    """a has version 1 when it leaves, and b still has version 0."""
    with trainer() as (t, connect):
        a, b = connect("a"), connect("b", capacity=2)
        t.hub.admit(0)
        a.given()
        t.hub.announce(1)
        message = t.update(a, 1)
        a.dialer.send(Moved(message.route.name, 1))
        a.dialer.send(record(0, turn(2)))
        a.dialer.send(record(0, turn(2, version=1)))
        a.dialer.send(ReplicaEnds("left", "SIGTERM"))
        until(lambda: t.crew.lost == 1)
        for number in (2, 3):
            b.finish(number)
        assert {e.number: e.version for _ in range(3) for e in b.next(Play).episodes if e.number < 2} == {
            0: 1,
            1: 0,
        }


def test_a_record_that_makes_an_episode_too_long_for_a_message_is_left_out() -> None:
    with trainer() as (t, connect):
        a = connect("a")
        many = Unfinished.of(-1, (RecordedHistory((1, 2), (turn(60),)),) * (SIZE // 700))
        given = Assignment(-1, TASKS[0], 0, 5, 0, 0.0, 1.0, 0, many.record)
        t.crew.members[t.names()["a"]].play([given])
        assert a.next(Play).episodes == (replace_struct(given, record=()),)
