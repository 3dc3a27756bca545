from __future__ import annotations

from megatron_stppo.replicas.wire.measure import Activity, Counters


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
        seconds=3.5,
        steps=3,
        step_seconds=2.0,
        updates=1,
        pause_seconds=1.0,
        longest_pause=1.0,
        recomputed=50,
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
