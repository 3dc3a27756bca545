from __future__ import annotations

import logging
import os
import resource
import signal
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from megatron_stppo.cluster.launch.process import free_port
from megatron_stppo.cluster.launch.rendezvous import (
    EAGER,
    INTERFACES,
    LAZY,
    address_towards,
    check_nccl_interface,
    connect_store,
    files_needed,
    host_store,
    meeting,
    raise_file_limit,
)
from megatron_stppo.cluster.launch.slurm import torchrun_variables
from megatron_stppo.config import ConfigError
from tests.ranks import RankError, run_ranks

SOON = timedelta(seconds=20)


def among(monkeypatch: pytest.MonkeyPatch, rank: int, world: int, **environment: str) -> None:
    """Set the environment variables of rank `rank` of `world`."""
    monkeypatch.setattr(os, "environ", environment | {"RANK": str(rank), "WORLD_SIZE": str(world)})


def listeners() -> set[tuple[str, int]]:
    found = psutil.Process().net_connections("inet")
    return {(one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN}


def test_a_single_rank_opens_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    before = listeners()
    among(monkeypatch, 0, 1)
    assert isinstance(meeting(SOON)["store"], dist.HashStore)
    assert listeners() == before


TORCHRUN = {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
SRUN = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "1"}
SRUN |= {"SLURM_JOB_NODELIST": socket.gethostname(), "SLURM_GTIDS": "0,1", "SLURM_STEP_ID": "0"}


@pytest.mark.parametrize("launcher", [TORCHRUN, SRUN], ids=["torchrun", "srun"])
def test_the_first_rank_listens_only_on_the_address_that_the_others_were_given(
    monkeypatch: pytest.MonkeyPatch, launcher: dict[str, str]
) -> None:
    port, before, got = free_port(), listeners(), []
    if launcher is SRUN:
        launcher = torchrun_variables(launcher)
    among(monkeypatch, 0, 2, **launcher | {"MASTER_PORT": port})

    def other() -> None:
        got.append(dist.TCPStore("127.0.0.1", int(port), 2, False, SOON).get("hello"))

    thread = threading.Thread(target=other)
    thread.start()
    store = meeting(SOON)["store"]
    store.set("hello", "you")
    thread.join()
    assert got == [b"you"]
    assert listeners() - before == {("127.0.0.1", int(port))}


def test_a_store_for_other_programs_listens_only_on_the_given_address() -> None:
    before = listeners()
    store, port = host_store("127.0.0.2", SOON)
    assert listeners() - before == {("127.0.0.2", port)}
    store.set("hello", "you")
    assert connect_store("127.0.0.2", port, SOON).get("hello") == b"you"
    assert address_towards("127.0.0.2", port).startswith("127.")
    with pytest.raises(ConnectionRefusedError):
        address_towards("127.0.0.1", port)
    with pytest.raises(OSError):
        host_store("192.0.2.1", SOON)  # reserved for documents: no host has it
    del store
    assert listeners() == before


def test_nccl_must_not_use_the_loopback_interface_if_the_other_program_is_on_another_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    check_nccl_interface("127.0.0.1")
    with pytest.raises(ConfigError, match=r"^NCCL_SOCKET_IFNAME=lo: .* connect to 192\.0\.2\.1; set it to"):
        check_nccl_interface("192.0.2.1")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    check_nccl_interface("192.0.2.1")


def test_ranks_of_one_host_use_the_loopback_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    among(monkeypatch, 1, 2, LOCAL_WORLD_SIZE="2", GLOO_SOCKET_IFNAME="ib0", **agent)
    assert meeting(SOON) == {"timeout": SOON}, "torchrun has already opened a store"
    assert [os.environ[name] for name in INTERFACES] == ["ib0", "lo"]
    among(monkeypatch, 1, 2, LOCAL_WORLD_SIZE="2", **agent)
    meeting(SOON, is_alone=False)
    assert [os.environ.get(name) for name in INTERFACES] == ["lo", None], "NCCL reads it once, for all groups"
    among(monkeypatch, 1, 4, LOCAL_WORLD_SIZE="2", **agent)
    meeting(SOON)
    assert not set(INTERFACES) & set(os.environ), (
        "ranks of several hosts need an interface that connects them"
    )


def connect_as(monkeypatch: pytest.MonkeyPatch, world: int) -> None:
    """Set the environment variables with which a run of `world` ranks makes groups."""
    monkeypatch.delenv(LAZY, raising=False)
    agent = "TORCHELASTIC_USE_AGENT_STORE"
    among(monkeypatch, 0, world, **os.environ | {agent: "True"})
    meeting(SOON)
    del os.environ[agent]


def open_files() -> tuple[int, int]:
    """Return the open files of a rank after a group of all ranks was made, and after its first collective."""
    dist.new_group(list(range(dist.get_world_size())))
    before = len(os.listdir("/proc/self/fd"))
    dist.barrier(group=dist.new_group(list(range(dist.get_world_size()))))
    return before, len(os.listdir("/proc/self/fd"))


def test_gloo_connects_many_ranks_only_when_they_exchange_data(monkeypatch: pytest.MonkeyPatch) -> None:
    connect_as(monkeypatch, EAGER)
    eager = run_ranks(open_files, 8)[1]
    connect_as(monkeypatch, EAGER + 1)
    lazy = run_ranks(open_files, 8)[1]
    assert lazy[0] <= eager[0] - 2 * 4, "two groups of 7 connections"
    assert lazy[1] <= eager[1] - 3


def sum_without_the_second(folder: Path) -> None:
    """Write a file folder/RANK if the sums of three new groups fail."""
    groups = [dist.new_group(list(range(dist.get_world_size()))) for _ in range(3)]
    dist.barrier()  # in another group
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)  # the second is dead when the others begin
    for group in groups:
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1), group=group)
    (folder / str(dist.get_rank())).touch()


def test_ranks_notice_at_once_that_one_died_before_it_exchanged_data(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    connect_as(monkeypatch, 3)
    with pytest.raises(RankError, match=r"^rank 1 died"):
        run_ranks(sum_without_the_second, 3, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"0", "2"}


def test_a_link_to_a_replica_takes_open_files() -> None:
    assert files_needed(64) == 4 * 64 + 1024
    # 71 connections to 63 trainer ranks and 8 of the replica, 5 other files, 80 of the store's server
    assert files_needed(64, 10, 8) - files_needed(64) == 10 * (71 + 5 + 80)


def test_a_rank_may_open_as_many_files_as_the_host_allows_and_the_nodes_first_rank_warns_if_too_few(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    hard = min(limits[1], 4096)
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: told.append(pair))
    monkeypatch.setenv("LOCAL_RANK", "1")
    raise_file_limit(1024)
    monkeypatch.setenv("LOCAL_RANK", "0")
    raise_file_limit(64)
    assert told == [(hard, hard)] * 2 and not caplog.records
    with caplog.at_level(logging.WARNING):
        raise_file_limit(1024)
        raise_file_limit(64, 20, 8)
    warning, of_replicas = caplog.records
    assert "but a run of 64 ranks and 20 replicas may need 4400; " in of_replicas.getMessage()
    assert warning.getMessage().startswith(
        "the hard limit on open files (ulimit -Hn) is 4096, but a run of 1024 ranks may need 5120; "
    )
