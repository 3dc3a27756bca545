"""Evaluations of an asynchronous run: all of their tokens are of the version that is evaluated."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megatron_stppo.base.errors import EngineLost
from megatron_stppo.config import Config
from megatron_stppo.data.exchange import Played
from megatron_stppo.parallel.layout import Layout
from megatron_stppo.replicas.trainer import served
from megatron_stppo.replicas.trainer.served import Served
from megatron_stppo.replicas.wire.messages import (
    Announce,
    Assignment,
    FromTrainer,
    Go,
    Offer,
    Play,
    Ready,
    Stop,
)
from megatron_stppo.training.rollouts import rollout_settings
from tests.replicas.hubs import TASKS, ScriptedReplica, Trainer, hello, played, trainer, until
from tests.rollout.vllm.tiny import build_model


@contextmanager
def serving(t: Trainer, folder: Path) -> Iterator[Served]:
    """A trainer of one rank whose weights go nowhere: only the order of messages matters here."""
    build_model(folder / "model")
    config = Config.model_validate(
        {
            "model": {"path": folder / "model"},
            "run": {"root": folder, "name": "run"},
            "serving": {"replicas": 2},
        }
    )
    learner: Any = SimpleNamespace(
        config=config, mesh=SimpleNamespace(layout=Layout()), load_for=lambda phase: None
    )
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield Served(learner, store, ("127.0.0.1", 1), t.hub)
    finally:
        dist.destroy_process_group()


class NoLink:
    def sync(self, version: int) -> SimpleNamespace:
        return SimpleNamespace(bytes_moved=0)

    def close(self) -> None: ...


def received(replica: ScriptedReplica) -> FromTrainer:
    """Return the next message, of any kind."""
    until(lambda: replica.got.extend(replica.dialer.take(0.05)) or replica.got)
    return replica.got.pop(0)


def finish(replica: ScriptedReplica, play: FromTrainer, version: int) -> None:
    assert isinstance(play, Play)
    for episode in play.episodes:
        replica.finish(episode.number, turns=played(0, version).turns)


def test_no_weights_are_sent_before_an_evaluation_has_ended_also_when_a_replica_dies_and_another_joins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.Link, "from_trainer", lambda *_: NoLink())
    results: list[Played] = []
    with trainer() as (t, connect), serving(t, tmp_path) as rollouts:

        def train() -> None:
            rollouts.publish(3)
            results.append(rollouts.play(TASKS[:6], 1, rollout_settings(rollouts.learner.config), 5))
            rollouts.publish(4)

        main = threading.Thread(target=train, daemon=True)  # a failed assertion below does not wait for it
        main.start()
        a, b, c = connect(), connect(), connect()
        for replica, name in ((a, "a"), (b, "b")):
            replica.dialer.send(hello(name, capacity=3))
            offer = received(replica)
            assert isinstance(offer, Offer) and offer.version == 3
        of_a, of_b = received(a), received(b)
        a.dialer.close()  # it dies with its three episodes; b is full
        until(lambda: t.crew.lost == 1)
        c.dialer.send(hello("c"))
        offer = received(c)
        assert isinstance(offer, Offer) and offer.version == 3, "the version that is evaluated"
        assert received(c) == of_a, "the same episodes with the same seeds"
        finish(c, of_a, 3)
        time.sleep(0.3)
        assert not b.dialer.take(0) and not c.dialer.take(0), "b still plays"
        finish(b, of_b, 3)
        for replica in (b, c):
            assert received(replica) == Announce(4)
            replica.dialer.send(Ready(4))
            assert received(replica) == Go(4)
        main.join(30)
        assert {v for x in results[0].every for turn in x.turns for v, _ in turn.versions} == {3}


def test_a_run_that_was_asked_to_end_does_not_wait_for_its_first_replicas(tmp_path: Path) -> None:
    with trainer(notice=lambda: "SIGTERM") as (t, _), serving(t, tmp_path) as rollouts:
        with pytest.raises(EngineLost, match=r"^before 2 replicas served: SIGTERM$"):
            rollouts.publish(0)


def test_a_replica_that_names_an_older_version_in_an_evaluation_is_expelled() -> None:
    with trainer() as (t, connect):
        a, b = connect(), connect()
        t.join(a, "a")  # at version 0
        t.hub.announce(1)
        a.dialer.send(Ready(1))
        t.hub.next_update(1)
        episode = Assignment(-1, TASKS[0], 0, 5, 0, 0.0, 1.0)
        t.hub.evaluate([episode])
        assert a.given() == [-1]
        a.finish(-1)  # its tokens name version 0
        until(lambda: t.crew.lost == 1)
        t.join(b, "b")
        assert b.next(Play).episodes == (episode,)


def test_weights_are_not_announced_during_an_evaluation() -> None:
    with trainer() as (t, connect):
        a = connect()
        t.join(a, "a")
        t.hub.evaluate([Assignment(-1, TASKS[0], 0, 5, 0, 0.0, 1.0)])
        with pytest.raises(AssertionError, match="one version"):
            t.hub.announce(1)
        a.finish(-1)
        t.hub.wait(lambda: t.hub.results([-1]))
        t.hub.announce(1)
        a.next(Announce)
        t.hub.close("done")
        a.next(Stop)
