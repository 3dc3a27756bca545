"""Where the trainer listens for replicas: on every launcher at an address that they can reach."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from megatron_stppo.cluster.launch.slurm import torchrun_variables
from megatron_stppo.config import ConfigError
from megatron_stppo.replicas.wire.address import check, find

HOSTS = {"gpu07": "10.1.0.7", "gpu08": "127.0.1.1", "ib7": "10.2.0.7"}
# The first of 8 tasks of a step on one node. The job has 3.
TASK = {
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "gpu[07-09]",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu07",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_GTIDS": "0,1,2,3,4,5,6,7",
}
TWO_NODES = {"SLURM_NTASKS": "16", "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_STEP_NUM_NODES": "2"}


@pytest.fixture(autouse=True)
def hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(name: str, *_: Any, **__: Any) -> list[tuple[Any, ...]]:
        if name not in HOSTS and not name[0].isdigit():
            raise socket.gaierror(-2, "Name or service not known")
        return [(None, None, None, "", (HOSTS.get(name, name), 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


def task(**changes: str) -> dict[str, str]:
    """Return the environment of a task after `discover`."""
    environment = TASK | changes
    return environment | torchrun_variables(environment)


def test_replicas_on_the_trainers_machine_connect_over_its_loopback_interface() -> None:
    assert find(None, True, {}) == find(None, False, {}) == "127.0.0.1"
    assert find(None, True, task()) == "127.0.0.1"


def test_replicas_of_other_steps_connect_to_the_host_of_a_trainer_whose_own_ranks_use_the_loopback() -> None:
    assert task()["MASTER_ADDR"] == "127.0.0.1"
    assert find(None, False, task()) == "10.1.0.7"


def test_replicas_connect_to_the_first_host_of_a_trainer_on_several_nodes() -> None:
    assert find(None, False, task(**TWO_NODES)) == "10.1.0.7"
    torchrun = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "gpu07"}
    assert find(None, False, torchrun) == "10.1.0.7"


@pytest.mark.parametrize("ranks", [{}, TWO_NODES])
def test_the_address_and_the_interface_that_a_user_gives_are_kept(ranks: dict[str, str]) -> None:
    assert find("ib7", False, task(**ranks)) == "10.2.0.7"
    assert find(None, False, task(MASTER_ADDR="ib7", **ranks)) == "10.2.0.7"


def test_a_host_that_resolves_its_name_to_the_loopback_needs_an_address() -> None:
    with pytest.raises(ConfigError, match=r"serving\.address=gpu08: is a loopback address, which"):
        find(None, False, task(SLURM_STEP_NODELIST="gpu08"))
    one_node = task(SLURM_STEP_NODELIST="gpu08", SLURM_JOB_NUM_NODES="1")
    assert find(None, False, one_node) == "127.0.1.1", "replicas of this job are on the same node"
    with pytest.raises(ConfigError, match=r"serving\.address=127\.0\.0\.1: is a loopback address, which"):
        find("127.0.0.1", False, task(**TWO_NODES))


def test_only_the_first_rank_must_have_the_address() -> None:
    with pytest.raises(ConfigError, match=r"serving\.address=192\.0\.2\.1: cannot listen on 192\.0\.2\.1 \("):
        check("192.0.2.1", False, {"RANK": "0"})
    check("192.0.2.1", False, {"RANK": "1"})
    check(None, True, {})


def test_an_unknown_host_is_named() -> None:
    with pytest.raises(ConfigError, match=r"serving\.address=nowhere: is not known"):
        find("nowhere", True, {})
