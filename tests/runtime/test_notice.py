from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from megatron_stppo.config import ConfigError
from megatron_stppo.runtime.notice import SIGNALS, Notice


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = [(number, signal.getsignal(number)) for number in SIGNALS]
    yield
    for number, handler in before:
        signal.signal(number, handler)


def alone(flag: bool) -> bool:
    return flag


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_waits_until_it_is_asked_for_and_a_second_one_does_nothing(number: signal.Signals) -> None:
    notice = Notice(margin=0)
    assert not notice.due(alone)
    os.kill(os.getpid(), number)
    assert notice.due(alone)
    assert notice.reason == number.name
    for again in SIGNALS:
        os.kill(os.getpid(), again)
        assert signal.getsignal(again) == signal.SIG_IGN, "children would die of it"


def test_another_ranks_notice_is_ours() -> None:
    notice = Notice(margin=0)
    assert notice.due(lambda mine: True)
    assert notice.reason == "another rank was given notice"


def test_notice_comes_when_one_more_iteration_would_end_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """All must be over at 1040: after 30 s that end at 1000 there is another go, after 20 at 1030 none."""
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1100")
    times = iter((970.0, 1000.0, 1010.0, 1030.0))  # the start; ends of iterations of 30, 10 and 20 s
    monkeypatch.setattr(time, "time", lambda: next(times))
    notice = Notice(margin=60)
    assert [notice.due(alone) for _ in range(3)] == [False, False, True]
    assert notice.reason == "SLURM_JOB_END_TIME is near"


def test_an_end_that_is_no_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", "tomorrow")
    with pytest.raises(ConfigError, match="SLURM_JOB_END_TIME=tomorrow: is no time"):
        Notice(margin=0)
