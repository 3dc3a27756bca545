"""Evaluations, whose tokens are all of the version that is evaluated, and a batch in which too many episodes
fail: nothing is trained on it, and a checkpoint has it open."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megatron_stppo.base.errors import EngineLost, TooManyFailures
from megatron_stppo.data.exchange import Played
from megatron_stppo.data.ledger import Terms
from megatron_stppo.data.tasks import TaskCursor
from megatron_stppo.replicas.trainer import served
from megatron_stppo.replicas.trainer.ledger import EpisodeLedger
from megatron_stppo.replicas.trainer.served import Served
from megatron_stppo.replicas.wire.episodes import decode_episodes
from megatron_stppo.replicas.wire.messages import (
    Announce,
    Assignment,
    FromTrainer,
    Give,
    Moved,
    Play,
    Ready,
    Receive,
    Route,
    Stop,
)
from megatron_stppo.training.rollouts import rollout_settings
from tests.replicas.hubs import TASKS, ScriptedReplica, Trainer, bare_learner, hello, played, trainer
from tests.replicas.peers import until
from tests.rollout.vllm.tiny import build_model


@contextmanager
def serving(t: Trainer, folder: Path) -> Iterator[Served]:
    """A trainer of one rank whose weights go nowhere: only the order of messages matters here."""
    build_model(folder / "model")
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield Served(bare_learner(folder), store, t.hub)
    finally:
        dist.destroy_process_group()


class NoLink:
    def __init__(self, route: Route) -> None:
        self.route = route

    def sync(self, version: int, packed: object) -> SimpleNamespace:
        return SimpleNamespace(bytes_moved=0)

    def pack(self) -> str:
        return "a copy"

    def close(self) -> None: ...


def received(replica: ScriptedReplica) -> FromTrainer:
    """Return the next message, of any kind."""
    until(lambda: replica.got.extend(replica.dialer.take(0.05)) or replica.got)
    return replica.got.pop(0)


def get(replica: ScriptedReplica, version: int) -> bool:
    """Receive a version. Return whether the trainer sends it."""
    message = received(replica)
    assert isinstance(message, Receive) and message.version == version
    replica.dialer.send(Moved(message.route.name, version))
    return not isinstance(message.route.source, int)


def give(replica: ScriptedReplica, version: int) -> None:
    message = received(replica)
    assert isinstance(message, Give) and message.version == version
    replica.dialer.send(Moved(message.route.name, version))


def finish(replica: ScriptedReplica, play: FromTrainer, version: int) -> None:
    assert isinstance(play, Play)
    for episode in play.episodes:
        replica.finish(episode.number, turns=played(0, version).turns)


def test_no_weights_are_sent_before_an_evaluation_has_ended_also_when_a_replica_dies_and_another_joins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.Link, "from_trainer", lambda _, route, *__: NoLink(route))
    results: list[Played] = []
    with trainer(version=-1) as (t, connect), serving(t, tmp_path) as rollouts:

        def train() -> None:
            rollouts.publish(3)
            results.append(rollouts.play(TASKS[:6], 1, rollout_settings(rollouts.learner.config), 5))
            rollouts.publish(4)

        main = threading.Thread(target=train, daemon=True)  # a failed assertion below does not wait for it
        main.start()
        a, b, c = connect(), connect(), connect()
        a.dialer.send(hello("a", capacity=3))
        assert get(a, 3)
        b.dialer.send(hello("b", capacity=3))
        give(a, 3)
        assert not get(b, 3), "a sends it"
        of_a, of_b = received(a), received(b)
        a.dialer.close()  # it dies with its three episodes; b is full
        until(lambda: t.crew.lost == 1)
        c.dialer.send(hello("c"))
        give(b, 3)
        assert not get(c, 3), "the version that is evaluated"
        assert received(c) == of_a, "the same episodes with the same seeds"
        finish(c, of_a, 3)
        time.sleep(0.3)
        assert not b.dialer.take(0) and not c.dialer.take(0), "b still plays"
        finish(b, of_b, 3)
        for replica in (b, c):
            assert received(replica) == Announce(4)
        b.dialer.send(Ready(4))  # else the trainer sends to the one that it hears first
        assert get(b, 4)
        main.join(30)
        assert {v for x in results[0].every for turn in x.turns for v, _ in turn.versions} == {3}


def test_a_run_that_was_asked_to_end_does_not_wait_for_its_first_replicas(tmp_path: Path) -> None:
    with trainer(notice=lambda: "SIGTERM", version=-1) as (t, _), serving(t, tmp_path) as rollouts:
        with pytest.raises(EngineLost, match=r"^before 2 replicas served: SIGTERM$"):
            rollouts.publish(0)


def test_a_replica_that_names_an_older_version_in_an_evaluation_is_expelled() -> None:
    with trainer() as (t, connect):
        a, b = connect(), connect()
        t.join(a, "a")  # at version 0
        t.hub.announce(1)
        message = t.update(a, 1)
        a.dialer.send(Moved(message.route.name, 1))
        episode = Assignment(-1, TASKS[0], 0, 5, 0, 0.0, 1.0, 1)
        t.hub.evaluate([episode])
        assert a.given() == [-1]
        a.finish(-1)  # its tokens name version 0
        until(lambda: t.crew.lost == 1)
        t.join(b, "b")
        assert b.next(Play).episodes == (episode,)


def test_weights_are_not_announced_during_an_evaluation() -> None:
    with trainer() as (t, connect):
        a = connect("a")
        t.hub.evaluate([Assignment(-1, TASKS[0], 0, 5, 0, 0.0, 1.0)])
        with pytest.raises(AssertionError, match="one version"):
            t.hub.announce(1)
        a.finish(-1)
        t.hub.wait(lambda: t.hub.results([-1]))
        t.hub.announce(1)
        a.next(Announce)
        t.hub.close("done")
        a.next(Stop)


def test_the_failed_episodes_of_all_batches_are_played_again_by_a_resumed_run_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "RECORDS", 0.1)  # the scripted replica has none
    with trainer() as (t, connect), serving(t, tmp_path) as rollouts:
        a = connect("a")

        def play() -> None:
            assert a.given() == [0, 1, 2, 3]
            a.finish(2, outcome="error")
            a.finish(1)
            a.finish(0, outcome="timeout")

        replica = threading.Thread(target=play)
        replica.start()
        with pytest.raises(TooManyFailures, match=r"^1 of 2 episodes failed") as raised:
            rollouts.draw(0)
        assert {one.outcome for one in raised.value.own} == {"timeout", "ok"}, "what the run then writes"
        replica.join()
        state, kept = rollouts.state() | {"iteration": 0}, decode_episodes(rollouts.episodes())[0]
    assert {done.number for done in kept} == {0, 1, 2}
    again = EpisodeLedger(TaskCursor(TASKS, 0), Terms(2, 1, 1))
    again.restore(state, kept)
    assert [episode.number for episode in again.unfinished()] == [0, 2, 3]
    assert again.admit(0) == [], "the bound is that of the iteration that failed"
