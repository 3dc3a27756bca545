"""What a replica's first rank receives and why it ends, over a real connection and with real environments."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from megatron_stppo.base.errors import ToolsStayAway
from megatron_stppo.environments.base import StepResult, ToolAway
from megatron_stppo.replicas.replica.news import End, NewsSource
from megatron_stppo.replicas.wire.channel import Channel
from megatron_stppo.replicas.wire.ends import Listener
from megatron_stppo.replicas.wire.measure import Activity
from megatron_stppo.replicas.wire.messages import (
    Announce,
    Assignment,
    Give,
    Play,
    Ready,
    Receive,
    Route,
    Stop,
)
from megatron_stppo.rollout.episodes.environment_host import EnvironmentHost, ToolWait
from tests.replicas.peers import connected, until
from tests.rollout.vllm.tiny import Game, task

ASKED = Assignment(7, task(0), 0, 11, 0, 1.0, 1.0)
ROUTE = Route("route-1", "127.0.0.1", 1, 1, 1, ("member-1", "member-2"))


class Box:
    """A source of news with the trainer's side of its connection."""

    def __init__(self, source: NewsSource, listener: Listener, peer: Channel) -> None:
        self.source, self.listener, self.peer, self.host = source, listener, peer, source.host
        self.signal = ""


@dataclass
class Playing:
    """What a source of news reads of a player."""

    asked: list[int] = field(default_factory=list)
    runs: bool = True
    playing: dict[int, Any] = field(default_factory=dict)


@contextmanager
def box(
    timeout: float = 30.0, game: type[Game] = Game, waits: bool = False, drain: bool = False
) -> Iterator[Box]:
    with (
        connected() as (listener, dialer, peer),
        EnvironmentHost(game, concurrency=4, deadline=5, tools=ToolWait(0), answered=dialer.wake) as host,
    ):
        source = NewsSource(
            dialer=dialer,
            host=host,
            activity=Activity(),
            timeout=timeout,
            records=True,
            drain=drain,
            awaits_answers=waits,
            asked_to_leave=lambda: opened.signal,
        )
        opened = Box(source, listener, peer)
        yield opened


def test_an_answer_of_an_environment_ends_the_wait_for_the_trainer() -> None:
    with box() as opened:
        opened.host.reset(7, task(0), seed=0)
        began = time.monotonic()
        until(lambda: opened.source.look(20.0) or 7 in opened.source.answers)
        assert time.monotonic() - began < 10
        assert opened.source.answers[7].messages == task(0).prompt


def test_messages_are_kept() -> None:
    with box() as opened:
        for message in (Play((ASKED,)), Announce(4), Receive(ROUTE, 4), Give(ROUTE, 3)):
            opened.listener.send(opened.peer, message)
        until(lambda: opened.source.look(1.0) or opened.source.to_give)
        assert (opened.source.announced, list(opened.source.assigned)) == (4, [7])
        assert (opened.source.to_receive, opened.source.to_give) == (Receive(ROUTE, 4), Give(ROUTE, 3))
        assert opened.source.assigned[7] == ASKED
        assert opened.source.end is None


def test_the_trainer_ends_the_replica_with_a_reason() -> None:
    for message, end in (
        (Stop("the run has ended"), End("stop", "the run has ended")),
        (Stop("vllm=0.1: no", is_refusal=True), End("refused", "vllm=0.1: no")),
    ):
        with box() as opened:
            opened.listener.send(opened.peer, message)
            until(lambda source=opened.source: source.look(1.0) or source.end)
            assert opened.source.end == end


def test_a_signal_ends_the_replica() -> None:
    with box() as opened:
        opened.source.look(0.0)
        assert opened.source.end is None
        opened.signal = "SIGUSR1"
        opened.source.look(0.0)
        assert opened.source.end == End("left", "SIGUSR1")


def test_a_trainer_that_is_gone_or_silent_is_lost() -> None:
    with box() as opened:
        opened.listener.close()
        until(lambda: opened.source.look(1.0) or opened.source.end)
        assert opened.source.end is not None and opened.source.end.kind == "lost"
        assert "the trainer has ended" in opened.source.end.text
    with box(timeout=0.1) as opened:
        time.sleep(0.3)  # less than the time between two signs of life
        until(lambda: opened.source.look(0.05) or opened.source.end)
        assert opened.source.end is not None and "(serving.timeout=0.1)" in opened.source.end.text


class Away(Game):
    async def step(self, action: str) -> StepResult:
        raise ToolAway("nobody listens on port 9")


def test_tools_that_stay_away_end_the_replica_even_while_it_does_not_wait_for_them() -> None:
    with box(game=Away) as opened:
        opened.host.reset(7, task(0), seed=0)
        until(lambda: opened.source.look(1.0) or opened.source.answers)
        opened.host.step(7, "search")
        with pytest.raises(ToolsStayAway, match="nobody listens on port 9"):
            until(lambda: opened.source.look(0.0))


def told_ready(opened: Box, patience: float) -> list[int]:
    """Return the versions for which the replica said within this time, or at once, that it waits."""
    ends, found = time.monotonic() + patience, []
    while not found and time.monotonic() < ends:
        taken = opened.listener.take(0.1)
        found = [message.version for _, message in taken if isinstance(message, Ready)]
    return found


@pytest.mark.parametrize("drain", [False, True])
def test_a_replica_that_waits_for_tools_takes_part_in_transfers_before_the_next_step(drain: bool) -> None:
    player = Playing(asked=[7], runs=not drain)
    with box(waits=True, drain=drain) as opened:
        source = opened.source
        source.version = 3
        opened.listener.send(opened.peer, Announce(4))
        until(lambda: source.look(1.0) or source.announced)
        if drain:
            news = source.next(player)  # type: ignore[arg-type]
            assert news.hold and news.waits
        assert source.next(player).waits  # type: ignore[arg-type]
        assert told_ready(opened, 20.0) == [4]
        opened.listener.send(opened.peer, Receive(ROUTE, 4))
        news = source.next(player)  # type: ignore[arg-type]
        assert (news.receive, news.answers, news.waits) == (Receive(ROUTE, 4), (), True)
        opened.listener.send(opened.peer, Give(ROUTE, 4))
        news = source.next(player)  # type: ignore[arg-type]
        assert (news.give, news.waits) == (Give(ROUTE, 4), True)
        opened.host.reset(7, task(0), seed=0)
        news = source.next(player)  # type: ignore[arg-type]
        assert [answer.index for answer in news.answers] == [7]
        assert not news.waits


def test_turns_that_are_completed_for_an_update_get_their_answers_first() -> None:
    player = Playing(asked=[7])
    with box(waits=True, drain=True) as opened:
        source = opened.source
        source.version = 3
        opened.listener.send(opened.peer, Announce(4))
        until(lambda: source.look(1.0) or source.announced)
        assert source.next(player).hold  # type: ignore[arg-type]
        opened.host.reset(7, task(0), seed=0)
        news = source.next(player)  # type: ignore[arg-type]
        assert [answer.index for answer in news.answers] == [7]
        assert not told_ready(opened, 0.3)
