"""The hub with real connections: assigning, updating, losing replicas, refusing what cannot be true."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from msgspec.structs import replace as replace_struct

from megatron_stppo.base.errors import EngineLost, ToolsStayAway
from megatron_stppo.base.types import Turn
from megatron_stppo.config import ConfigError
from megatron_stppo.data.ledger import Taken
from megatron_stppo.data.tasks import TaskCursor
from megatron_stppo.replicas.trainer.crew import Crew, shares
from megatron_stppo.replicas.wire.messages import Assignment, Moved, Play, Receive, ReplicaEnds, Stop
from tests.replicas.hubs import SIZE, TASKS, hello, trainer
from tests.replicas.peers import until


def test_episodes_are_shared_out_and_a_batch_is_complete_when_its_episodes_are() -> None:
    with trainer() as (t, connect):
        a, b = connect("a"), connect("b")
        t.hub.admit(0)
        assert (a.given(), b.given()) == ([0, 1], [2, 3])
        b.finish(2)
        until(
            lambda: t.hub.ask(Crew.numbers)["episodes_finished"] == 1
        )  # b and a have connections of their own
        a.finish(1)
        a.finish(0)
        batch = t.hub.wait(t.hub.batch)
        assert [x.prompt_ids for x in batch] == [(1,), (2,)]
        assert [x.task for x in batch] == TaskCursor(TASKS, 0).take(2), "the trainer's own tasks"
        t.hub.admit(1)
        assert (a.given(), b.given()) == ([4], [5]), "4 to a, which plays none; then both play one"
        assert t.queues() == {"episodes_waiting": 0, "episodes_playing": 3, "episodes_finished": 1}


def test_groups_without_variance_are_dropped_and_others_are_assigned_while_the_trainer_waits() -> None:
    """A group of one episode has no variance, so that two rounds of two groups are dropped."""
    with trainer(staleness=0, resample=2) as (t, connect):
        a = connect("a")
        t.hub.admit(0)
        batches: list = []
        main = threading.Thread(target=lambda: batches.append(t.hub.wait(t.hub.batch)), daemon=True)
        main.start()
        for expected in ([0, 1], [2, 3], [4, 5]):
            assert not batches and a.given() == expected
            for number in expected:
                a.finish(number)
        main.join(30)
        assert [x.prompt_ids for x in batches[0]] == [(5,), (6,)]
        assert t.ledger.taken == Taken([4, 5], [[0, 1], [2, 3]])
        assert [(s.group, s.index) for s in t.ledger.dropped] == [
            (place, task.index) for place, task in enumerate(TaskCursor(TASKS, 0).take(4))
        ]


def test_a_replica_gets_no_more_episodes_than_its_capacity_and_the_rest_when_it_has_finished_one() -> None:
    with trainer() as (t, connect):
        a = connect("a", capacity=3)
        t.hub.admit(0)
        assert a.given() == [0, 1, 2]
        a.finish(1)
        assert a.given() == [3]


def test_a_lost_replicas_episodes_are_played_by_another_with_the_same_seeds() -> None:
    with trainer() as (t, connect):
        a, b = connect("a"), connect()
        t.hub.admit(0)
        first = a.next(Play).episodes
        a.finish(1)
        t.join(b, "b")
        a.dialer.close()  # its connection ends
        assert b.next(Play).episodes == (first[0], *first[2:])
        assert (t.crew.lost, t.hub.ask(Crew.numbers)["reassigned"]) == (1, 3)


def test_ranks_that_wait_for_a_lost_replica_are_told() -> None:
    with trainer() as (t, connect):
        a, b = connect(), connect()
        first = t.join(a, "a")
        a.dialer.send(ReplicaEnds("left", "SIGTERM"))
        until(lambda: t.told == [(first, "it was asked to end: SIGTERM")])
        b.dialer.send(hello("b"))
        until(lambda: "b" in t.names())
        second = t.names()["b"]  # no weights are sent to it yet
        b.dialer.send(ReplicaEnds("left", "SIGTERM"))
        until(lambda: t.told[1:] == [(second, "it was asked to end: SIGTERM")])


def test_replicas_are_served_while_a_loss_cannot_be_told() -> None:
    store_answers = threading.Event()
    with trainer(tell_lost=lambda group, why: store_answers.wait()) as (t, connect):
        a, b = connect("a"), connect()
        a.dialer.send(ReplicaEnds("left", "SIGTERM"))
        until(lambda: t.crew.lost == 1)
        t.join(b, "b")
        t.hub.admit(0)
        for number in b.given():
            b.finish(number)
        assert t.hub.wait(t.hub.batch) is not None and not store_answers.is_set()
        store_answers.set()


@pytest.mark.parametrize(
    "changed, why",
    [
        ({"number": 17}, "was not given"),
        ({"turns": (Turn((7,), (-0.5,), (), 0.0, ((3, 1),)),)}, "version 3"),
        ({"turns": (Turn((100,), (-0.5,), (), 0.0, ((0, 1),)),)}, "token"),
        ({"prompt_ids": tuple(range(70))}, "64"),
    ],
    ids=[
        "an episode of another",
        "a version it was never sent",
        "a token outside the vocabulary",
        "too long",
    ],
)
def test_a_replica_that_claims_what_cannot_be_true_is_expelled(changed, why: str, caplog) -> None:
    with trainer() as (t, connect):
        a, b = connect("a"), connect()
        t.hub.admit(0)
        a.given()
        fields = dict(changed)
        a.finish(fields.pop("number", 0), **fields)
        until(lambda: t.crew.lost == 1)
        a.finish(1)  # ignored
        t.join(b, "b")
        assert b.given() == [0, 1, 2, 3]
        assert why in caplog.text and t.ledger.ready == 0


@pytest.mark.parametrize(
    "changed, why",
    [
        ({"model": "m1"}, "model=m1 of the replica r differs"),
        ({"vocabulary": 99}, "vocabulary=99"),
        ({"vllm": "0.31.0"}, "vllm=0.31.0"),
        ({"name": "../x"}, "--name="),
        ({"tensor": 10**9}, "rollout.engine_tensor=1000000000, serving.concurrency=8 of the replica r"),
        ({"capacity": 0}, "serving.concurrency=0"),
    ],
)
def test_a_replica_of_another_model_vocabulary_or_version_is_refused(changed, why: str) -> None:
    with trainer() as (_, connect):
        a = connect()
        a.dialer.send(hello(**({"name": "r"} | changed)))
        assert why in a.next(Stop).reason


def test_a_second_replica_of_the_same_name_is_refused() -> None:
    with trainer() as (t, connect):
        connect("a")
        b = connect()
        b.dialer.send(hello("a"))
        assert "serves already" in b.next(Stop).reason
        assert t.crew.joined == 1


def test_a_run_that_was_asked_to_end_does_not_wait_for_replicas_that_have_left() -> None:
    asked: list[str] = []
    with trainer(notice=lambda: "".join(asked)) as (t, connect):
        a = connect("a")
        t.hub.admit(0)
        assert a.given() == [0, 1, 2, 3]
        a.finish(0)
        asked.append("SIGTERM")
        a.finish(1)
        assert t.hub.wait(t.hub.batch) is not None, "a replica that serves completes the iteration"
        a.dialer.send(ReplicaEnds("left", "SIGTERM"))
        t.hub.admit(1)
        with pytest.raises(EngineLost, match=r"^SIGTERM, and no replica serves any more$"):
            t.hub.wait(t.hub.batch)


def test_what_concerns_a_lost_replica_does_not_concern_the_one_that_has_taken_its_name() -> None:
    with trainer() as (t, connect):
        a, again = connect(), connect()
        old = t.join(a, "a")
        t.hub.admit(0)
        t.hub.announce(1)
        route = t.update(a, 1).route.name
        a.dialer.close()
        until(lambda: t.crew.lost == 1)
        again.dialer.send(hello("a"))
        until(lambda: "a" in t.names())
        new = t.names()["a"]
        assert new != old
        t.hub.ask(lambda crew: crew.expel(old, "weights could not be sent to it"))
        again.dialer.send(Moved(route, 1))  # of a transfer that is not its own
        assert isinstance(message := t.hub.wait(lambda: None), Receive)
        assert message.route.name != route and message.route.ends == (new,)
        assert (set(t.crew.members), t.crew.joined, t.crew.lost) == ({new}, 0, 1)


def test_a_silent_replica_that_wakes_up_learns_that_it_was_lost() -> None:
    with trainer(timeout=0.3) as (t, connect):
        a = connect("a")
        until(lambda: t.crew.lost == 1)
        until(lambda: a.dialer.take(0.05) == [] and "has expelled this replica" in a.dialer.ended)


def test_an_evaluation_comes_before_waiting_episodes_and_is_not_trained() -> None:
    with trainer() as (t, connect):
        a = connect("a", capacity=2)
        t.hub.admit(0)
        assert a.given() == [0, 1]
        t.hub.evaluate(
            [Assignment(-1, TASKS[3], 0, 5, 0, 0.0, 1.0), Assignment(-2, TASKS[4], 1, 5, 1, 0.0, 1.0)]
        )
        a.finish(0)
        assert a.given() == [-1]
        a.finish(1)
        assert a.given() == [-2]
        a.finish(-2)
        a.finish(-1)
        results = t.hub.wait(lambda: t.hub.results([-1, -2]))
        assert [x.prompt_ids for x in results] == [(50,), (49,)]


def test_episodes_that_are_too_long_for_one_message_are_sent_in_several() -> None:
    long = [
        Assignment(-n, replace(TASKS[0], extra={"text": "x" * (SIZE // 3)}), 0, 5, 0, 0.0, 1.0)
        for n in range(1, 6)
    ]
    with trainer() as (t, connect):
        a = connect("a")
        t.hub.evaluate(long)
        assert [a.given() for _ in range(3)] == [[-1, -2], [-3], [-4, -5]]
        with pytest.raises(ValueError, match="exceeds the limit"):
            t.hub.evaluate(
                [replace_struct(long[0], number=-6, task=replace(TASKS[0], data_source="x" * SIZE))]
            )


@pytest.mark.parametrize("kind, error", [("misuse", ConfigError), ("away", ToolsStayAway)])
def test_what_ends_a_colocated_run_ends_the_trainer(kind: str, error: type[Exception]) -> None:
    with trainer() as (t, connect):
        a = connect("a")
        a.dialer.send(ReplicaEnds(kind, "the reason"))
        with pytest.raises(error, match="the reason"):
            t.hub.wait(lambda: None)


def test_episodes_go_to_the_replica_that_plays_fewest_and_has_room() -> None:
    assert shares(5, [0, 2], [8, 8]) == [3, 2]
    assert shares(1, [3, 1, 2], [8, 8, 8]) == [0, 1, 0]
    assert shares(9, [0, 0], [2, 4]) == [2, 4]
    assert shares(3, [4], [4]) == [0]
    assert shares(3, [], []) == []


def test_idle_replicas_get_the_shares_of_a_colocated_run() -> None:
    for replicas in (1, 2, 3, 4):
        for each in (1, 2, 7):
            assert shares(replicas * each, [0] * replicas, [99] * replicas) == [each] * replicas
