from __future__ import annotations

import threading
import time

import pytest

from megatron_stppo.parallel.abandon import POLL, GivenUp, call_unless


def never() -> str:
    return ""


def test_a_call_that_returns_or_raises_does_so_in_the_callers_thread() -> None:
    assert call_unless(lambda: 3, never, print) == 3
    with pytest.raises(KeyError, match="no such row"):
        call_unless(lambda: {}["no such row"], never, print)


def test_a_call_that_waits_is_released_and_given_up_when_there_is_a_reason() -> None:
    started, ended, released = time.monotonic(), threading.Event(), list[str]()

    def release(why: str) -> None:
        released.append(why)
        ended.set()

    def reason() -> str:
        return "rank 3 is lost" if time.monotonic() > started + 2 * POLL else ""

    with pytest.raises(GivenUp, match=r"^rank 3 is lost$"):
        call_unless(ended.wait, reason, release)
    assert released == ["rank 3 is lost"]


def test_a_call_that_cannot_be_released_does_not_hold_the_caller() -> None:
    forever = threading.Event()
    with pytest.raises(GivenUp):
        call_unless(forever.wait, lambda: "lost", lambda why: None)
    forever.set()
