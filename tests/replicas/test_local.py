"""Replicas of this machine: started, started again, ended with the trainer. None of them builds an engine."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from megatron_stppo.cluster import exits
from megatron_stppo.config import ConfigError
from megatron_stppo.replicas.trainer.local import LocalReplica, LocalReplicas
from megatron_stppo.replicas.wire.messages import Stop, process_name
from tests.replicas.hubs import hello, trainer
from tests.replicas.peers import seconds, until


def test_a_replica_that_is_killed_is_started_again_until_the_budget_is_used_up(tmp_path: Path) -> None:
    local = LocalReplicas(tmp_path, ["replica-0"], budget=1)  # wait for a trainer
    first = local._processes["replica-0"].pid
    found: list[tuple[str, str]] = []
    for number in (1, 2):
        local.kill("replica-0")
        local.kill("replica-9")  # of another machine
        until(lambda: found.extend(local.ended()) or len(found) == number)  # noqa: B023
        assert found[-1][0] == "replica-0" and found[-1][1].startswith("its process ended with -9")
        if number == 1:
            assert local._processes["replica-0"].pid != first and not local.gave_up
    assert "rollout.engine_restarts is used up" in local.gave_up


def test_a_replica_that_ends_when_the_run_must_end_is_not_started_again(tmp_path: Path) -> None:
    local = LocalReplicas(tmp_path, ["replica-0"], budget=1)
    local.kill("replica-0")
    until(lambda: local.ended(start_again=False))
    assert not local._processes and not local.gave_up


def test_a_replica_that_could_not_be_asked_to_end_is_not_waited_for(tmp_path: Path) -> None:
    local = LocalReplicas(tmp_path, ["replica-0", "replica-1"], budget=0)
    assert seconds(lambda: local.close(asked=set())) < 5
    assert [replica.ended() for replica in local._processes.values()] == [-9, -9]


def test_a_replica_has_ended_when_all_of_its_ranks_have_and_its_code_is_that_of_the_first() -> None:
    replica = LocalReplica([subprocess.Popen(("sleep", "60")), subprocess.Popen(("sh", "-c", "exit 3"))])
    until(lambda: len(replica.left(0.0)) == 1)
    assert replica.ended() is None, "the other rank is killed, and not waited for"
    until(replica.ended)
    assert replica.ended() == 3 and replica.left(0.0) == []


def test_a_replica_from_elsewhere_cannot_take_the_name_of_one_that_this_machine_starts(
    tmp_path: Path,
) -> None:
    local = LocalReplicas(tmp_path, ["replica-0"], budget=0)
    own = process_name(local._processes["replica-0"].pid)
    with trainer(local=local) as (t, connect):
        elsewhere, here = connect(), connect()
        elsewhere.dialer.send(hello("replica-0", process="gpu07-4711"))
        assert elsewhere.next(Stop).reason == (
            "--name=replica-0: train starts a replica of this name itself; choose another"
        )
        t.join(here, "replica-0", process=own)
        t.join(connect(), "replica-1", process="gpu07-4711")
        assert t.crew.joined == 2
        local.kill("replica-0")  # it still waits for a trainer


def test_a_replica_that_is_used_wrongly_ends_the_run_with_its_line_and_no_traceback_of_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    local = LocalReplicas(tmp_path, [".hidden"], budget=1)
    with trainer(local=local) as (t, _):
        with pytest.raises(ConfigError, match=r"^--name=\.hidden: give up to 64 letters"):
            t.hub.wait(lambda: None)
    assert not raised


@pytest.mark.parametrize(("imported", "look"), [(True, 0.01), (False, 3600.0)])
def test_a_process_ends_soon_after_the_one_that_has_started_it(
    imported: bool, look: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it imports, its thread may not run for a long time."""
    monkeypatch.setattr(exits, "LOOK", look)
    monkeypatch.setattr(exits, "GRACE", 0.1)
    assert not exits.has_ended(None) and not exits.has_ended(os.getppid())
    reads, writes = os.pipe()
    if (trainer := os.fork()) == 0:
        starter = os.getpid()
        if os.fork() == 0:
            exits.end_after(starter)
            if imported:
                exits.end_normally()
            os.write(writes, b"1")
            time.sleep(60)
        time.sleep(60)
    assert os.read(reads, 1) == b"1"
    os.kill(trainer, signal.SIGKILL)
    os.waitpid(trainer, 0)
    os.close(writes)  # the last writing end is that of the process, which must end
    assert seconds(lambda: os.read(reads, 1)) < 30
    os.close(reads)
