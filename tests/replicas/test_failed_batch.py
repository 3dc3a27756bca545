"""A batch in which too many episodes fail: nothing is trained on it, and a checkpoint has it open."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from megatron_stppo.base.errors import TooManyFailures
from megatron_stppo.data.ledger import Terms
from megatron_stppo.data.tasks import TaskCursor
from megatron_stppo.replicas.trainer.ledger import EpisodeLedger
from megatron_stppo.replicas.wire.episodes import decode_episodes
from tests.replicas.hubs import TASKS, trainer
from tests.replicas.test_evaluation import serving


def test_the_failed_episodes_of_all_batches_are_played_again_by_a_resumed_run_and_no_others(
    tmp_path: Path,
) -> None:
    with trainer() as (t, connect), serving(t, tmp_path) as rollouts:
        a = connect()
        t.join(a, "a")

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
