"""What replicas measure, the metrics of asynchronous training, and their description."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_stppo.replicas.trainer.crew import Crew
from megatron_stppo.replicas.wire import measure
from megatron_stppo.replicas.wire.measure import Activity, Counters, ServingMeter
from megatron_stppo.replicas.wire.messages import Alive, ReplicaEnds
from tests.documented import undocumented, unreported
from tests.replicas.hubs import ScriptedReplica, Trainer, trainer
from tests.replicas.peers import until

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
    before = t.hub.ask(Crew.counters)
    replica.dialer.send(Alive(counters))
    until(lambda: t.hub.ask(Crew.counters) != before)


def test_a_row_has_the_differences_since_the_last_one_and_lost_replicas_count(clock: SimpleNamespace) -> None:
    with trainer() as (t, connect):
        a, b, again = connect("a"), connect("b"), connect()
        meter = ServingMeter()
        meter.waited, meter.sent = 30.0, 10**6  # before training
        meter.start(t.hub.ask(Crew.counters))
        t.hub.admit(0)
        report(t, a, FIRST)
        report(t, b, Counters(seconds=2.0, idle_seconds=2.0, longest_pause=0.25))
        b.dialer.send(ReplicaEnds("left", "SIGTERM"))
        until(lambda: t.crew.lost == 1)
        meter.waited, meter.sent, clock.now = 4.0, 3_500_000, 110.0
        row = meter.row(t.hub.ask(Crew.counters), t.hub.ask(Crew.numbers))
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
        row = meter.row(t.hub.ask(Crew.counters), t.hub.ask(Crew.numbers))
        assert (row["serving/generated_tokens"], row["serving/step_ms"]) == (6.0, 250.0)
        assert (row["serving/trainer_idle_share"], row["serving/idle_share"]) == (0.0, 0.0)
        assert "serving/pause_ms" not in row, "no update, no pause"


def test_every_metric_of_asynchronous_training_is_described(clock: SimpleNamespace) -> None:
    with trainer(order="completion") as (t, connect):
        a = connect("a")
        meter = ServingMeter()
        meter.start(t.hub.ask(Crew.counters))
        report(t, a, FIRST)
        clock.now += 1
        row = meter.row(t.hub.ask(Crew.counters), t.hub.ask(Crew.numbers))
    assert not undocumented(row)
    assert not [name for name in unreported(row) if name.startswith("serving/")]
    assert not undocumented(["staleness/tokens_0", "staleness/tokens_3"])


def joined() -> Activity:
    activity = Activity()
    activity.updated(0.0, 0.0, recomputed=0, interrupts=False)
    return activity


def test_a_pause_lasts_from_the_last_step_before_an_update_to_the_first_one_after_it() -> None:
    activity = joined()
    activity.stepped(0.0, 1.0)
    activity.updated(1.25, 1.5, recomputed=50, interrupts=True)
    now = activity.counters
    assert (now.pause_seconds, now.updates, now.recomputed) == (0, 0, 50), "the pause has not ended"
    activity.stepped(2.0, 2.5)
    activity.stepped(3.0, 3.5)
    assert activity.counters == Counters(
        seconds=3.5, steps=3, step_seconds=2.0, updates=1, pause_seconds=1.0, longest_pause=1.0, recomputed=50
    )


def test_an_update_of_an_idle_replica_pauses_it_for_the_update_only() -> None:
    activity = joined()
    activity.stepped(0.0, 1.0)
    activity.waited(1.0, 9.0)
    activity.updated(9.0, 9.5, recomputed=0, interrupts=False)
    activity.stepped(20.0, 21.0)
    activity.updated(21.0, 21.25, recomputed=0, interrupts=False)
    now = activity.counters
    assert (now.idle_seconds, now.pause_seconds, now.longest_pause, now.updates) == (8.0, 0.75, 0.5, 2)


def test_weights_that_are_passed_on_make_the_pause_longer_and_are_no_update() -> None:
    activity = joined()
    activity.stepped(0.0, 1.0)
    activity.updated(1.0, 1.5, recomputed=0, interrupts=False)
    activity.gave(2.0, 4.0)
    now = activity.counters
    assert (now.updates, now.pause_seconds, now.longest_pause) == (1, 2.5, 2.0)


def test_the_time_before_a_replica_has_joined_is_not_counted() -> None:
    activity = Activity()
    activity.waited(0.0, 30.0)
    activity.updated(30.25, 30.5, recomputed=0, interrupts=False)
    activity.waited(31.0, 32.0)
    assert activity.counters == Counters(seconds=1.5, idle_seconds=1.0)


def test_tokens_are_a_total_and_episodes_are_counted() -> None:
    activity = Activity()
    before = activity.counters
    activity.played(tokens=0, episodes=0)
    assert activity.counters is before
    activity.played(tokens=30, episodes=2)
    activity.played(tokens=50, episodes=1)
    assert (activity.counters.tokens, activity.counters.episodes) == (50, 3)
