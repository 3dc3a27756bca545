"""What weights a replica has after a failed transfer, which links it closes, and when it makes no step."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_stppo.replicas.replica.news import News
from megatron_stppo.replicas.replica.replica import Replica
from megatron_stppo.replicas.wire.messages import Receive, Route
from megatron_stppo.replicas.wire.weights import LinkLost
from megatron_stppo.weights.reshard.resharder import ReshardError

FIRST, SECOND = (Route(f"route-{n}", "127.0.0.1", 1, 1, 1, ("member-1",)) for n in (1, 2))


class Wire:
    """A link that sends nothing."""

    def __init__(self, fails: bool) -> None:
        self.fails, self.is_closed = fails, False

    def sync(self, version: int) -> None:
        if self.fails:
            raise LinkLost("its other end is gone")

    def is_lost(self) -> bool:
        return True

    def close(self) -> None:
        self.is_closed = True


def test_a_replica_has_no_weights_from_a_failed_transfer_until_the_next_one_that_succeeds() -> None:
    made: list[Wire] = []
    engine: Any = SimpleNamespace(
        settle=list, computed_tokens=0, unfinished=0, refresh=lambda recompute: None
    )
    unused: Any = None

    def link(route: Route, receives: bool) -> Any:
        made.append(Wire(fails=route == SECOND))
        return made[-1]

    replica = Replica(engine, unused, link, lambda name: nullcontext(), None)
    with pytest.raises(ReshardError, match=r"no weights have arrived"):
        replica.published()
    replica._receive(Receive(FIRST, 3))
    assert replica.published() == 3
    replica._receive(Receive(SECOND, 4))
    with pytest.raises(ReshardError, match=r"version 4 has not arrived"):
        replica.published()
    assert made[0].is_closed, "a link whose end is lost, when a new one is made"
    replica._receive(Receive(FIRST, 4))
    assert replica.published() == 4 and len(made) == 3


def test_no_engine_step_follows_what_waits_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    unused: Any = None
    replica = Replica(SimpleNamespace(), unused, unused, unused, None)  # type: ignore[arg-type]
    news, steps = [News(waits=True), News()], list[int]()
    monkeypatch.setattr(replica, "_hear", lambda: news.pop(0))
    monkeypatch.setattr(replica, "_step", lambda: steps.append(len(news)))
    assert replica._turn() is None and steps == []
    assert replica._turn() is None and steps == [0]
