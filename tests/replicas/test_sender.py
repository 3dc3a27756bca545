"""What the trainer's thread that sends does when a link, or the sending itself, fails."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megatron_stppo.replicas.trainer.served import Sender
from megatron_stppo.replicas.wire.messages import Receive, Route
from megatron_stppo.replicas.wire.weights import Link, LinkLost
from tests.ranks import run_ranks

TO_FIRST, TO_SECOND = (
    Receive(Route(f"route-{n}", "127.0.0.1", 1, 1, 1, (f"member-{n}",)), 4) for n in (1, 2)
)


class Failing:
    """A link that sends nothing, and fails as the list says that all links share, or moves 10 bytes."""

    def __init__(self, fails: list[Exception]) -> None:
        self.fails, self.is_closed = fails, False

    def sync(self, version: int, packed: Any) -> Any:
        if self.fails:
            raise self.fails.pop(0)
        return SimpleNamespace(bytes_moved=10)

    def close(self) -> None:
        self.is_closed = True


class Noting:
    """A hub that names what to send, and notes what it is told."""

    def __init__(self, *sends: Receive) -> None:
        self.sends, self.told = [*sends, False], list[tuple[str, str]]()

    def next_to_send(self, patience: float, tensor: int) -> Receive | bool:
        return self.sends.pop(0)

    def ask(self, question: Callable[[Any], None]) -> None:
        question(self)

    def expel(self, group: str, why: str) -> None:
        self.told.append((group, why))

    def fail(self, error: Exception) -> None:
        self.told.append(("fail", str(error)))


def sender(patch: pytest.MonkeyPatch, hub: Noting, *fails: Exception) -> tuple[Sender, list[Failing]]:
    """Return a sender of one rank, and the links that it makes."""
    made, left = list[Failing](), list(fails)

    def make(*_: Any) -> Failing:
        made.append(Failing(left))
        return made[-1]

    patch.setattr(Link, "from_trainer", make)
    unused: Any = None
    return Sender(unused, dist.HashStore(), timedelta(seconds=20), hub), made  # type: ignore[arg-type]


def loses() -> list[Any]:
    with pytest.MonkeyPatch.context() as patch:
        hub = Noting(TO_FIRST, TO_FIRST, TO_SECOND)
        given, made = sender(patch, hub, LinkLost("it is gone"))
        given.begin(None, 1)  # type: ignore[arg-type]
        given.join()
        stale = given.stale({"route-1"})
        given.close(stale)
        return [hub.told, given.sent, stale, [link.is_closed for link in made]]


def fails() -> list[Any]:
    with pytest.MonkeyPatch.context() as patch:
        hub = Noting(TO_FIRST)
        given, _ = sender(patch, hub, RuntimeError("a bug"))
        given.begin(None, 1)  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="a bug"):
            given.join()
        return hub.told


def test_a_replica_whose_link_fails_is_lost_and_gets_a_new_link_and_stale_links_are_closed() -> None:
    ((told, sent, stale, closed),) = run_ranks(loses, 1)
    assert told == [("member-1", "it is gone")] and sent == 20
    assert stale == ["route-2"] and closed == [False, False, True]


def test_an_error_of_the_thread_wakes_the_main_thread_and_is_raised_by_join() -> None:
    assert run_ranks(fails, 1) == [[("fail", "a bug")]]
