"""The metrics of asynchronous training, and their description."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_stppo.replicas.wire import measure
from megatron_stppo.replicas.wire.measure import Counters, ServingMeter
from megatron_stppo.replicas.wire.messages import Alive, ReplicaEnds
from tests.documented import undocumented, unreported
from tests.replicas.hubs import ScriptedReplica, Trainer, trainer, until

FIRST = Counters(
    seconds=8.0,
    steps=4,
    step_seconds=5.0,
    idle_seconds=2.0,
    updates=2,
    pause_seconds=0.5,
    longest_pause=0.375,
    recomputed=30,
    tokens=40,
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clock of meters: `now` in seconds."""
    clock = SimpleNamespace(now=100.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(measure, "time", clock)
    return clock


def report(t: Trainer, replica: ScriptedReplica, counters: Counters) -> None:
    """Send a replica's counters, and wait until the hub has them."""
    before = t.hub.counters()
    replica.dialer.send(Alive(counters))
    until(lambda: t.hub.counters() != before)


def test_a_row_has_the_differences_since_the_last_one_and_lost_replicas_count(clock: SimpleNamespace) -> None:
    with trainer() as (t, connect):
        a, b, again = connect(), connect(), connect()
        t.join(a, "a")
        t.join(b, "b")
        meter = ServingMeter()
        meter.waited, meter.sent = 30.0, 10**6  # before training
        meter.start(t.hub.counters())
        t.hub.admit(0)
        report(t, a, FIRST)
        report(t, b, Counters(seconds=2.0, idle_seconds=2.0, longest_pause=0.25))
        b.dialer.send(ReplicaEnds("left", "SIGTERM"))
        until(lambda: t.crew.lost == 1)
        meter.waited, meter.sent, clock.now = 4.0, 3_500_000, 110.0
        row = meter.row(t.hub.counters(), t.hub.numbers())
        assert 0 < row.pop("serving/update_seconds") < 30
        assert row == {
            "serving/replicas": 1,
            "serving/lost": 1,
            "serving/reassigned": 2,
            "serving/episodes_waiting": 0,
            "serving/episodes_playing": 4,
            "serving/episodes_finished": 0,
            "serving/trainer_idle_share": 0.4,
            "serving/idle_share": 4 / 10,
            "serving/step_share": 5 / 10,
            "serving/step_ms": 1250.0,
            "serving/tokens_per_step": 10.0,
            "serving/generated_tokens": 40.0,
            "serving/recomputed_tokens": 30.0,
            "serving/pause_ms": 250.0,
            "serving/longest_pause_ms": 375.0,
            "serving/weights_sent_mb": 3.5,
            "rollout/tokens_per_second": 4.0,
        }
        t.join(again, "b")  # its counters begin at 0 again
        report(t, again, Counters(seconds=5.0, tokens=6, steps=3, step_seconds=0.75))
        clock.now = 112.0
        row = meter.row(t.hub.counters(), t.hub.numbers())
        assert (row["serving/generated_tokens"], row["serving/step_ms"]) == (6.0, 250.0)
        assert (row["serving/trainer_idle_share"], row["serving/idle_share"]) == (0.0, 0.0)
        assert "serving/pause_ms" not in row, "no update, no pause"


def test_every_metric_of_asynchronous_training_is_described(clock: SimpleNamespace) -> None:
    with trainer(order="completion") as (t, connect):
        a = connect()
        t.join(a, "a")
        meter = ServingMeter()
        meter.start(t.hub.counters())
        report(t, a, FIRST)
        clock.now += 1
        row = meter.row(t.hub.counters(), t.hub.numbers())
    assert not undocumented(row)
    assert not [name for name in unreported(row) if name.startswith("serving/")]
    assert not undocumented(["staleness/tokens_0", "staleness/tokens_3"])
