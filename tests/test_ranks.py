import os
import socket
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError, run_ranks


def add_ranks(offset):
    total = torch.tensor([float(offset + dist.get_rank())])
    dist.all_reduce(total)
    return total.item()


def fail_on_rank_1():
    if dist.get_rank() == 1:
        raise ValueError("as planned")
    dist.barrier()


def die_on_rank_1():
    if dist.get_rank() == 1:
        os._exit(1)
    time.sleep(0.5)
    raise ValueError("left alone")


def test_every_rank_returns_its_result_and_a_failing_rank_ends_the_others():
    assert run_ranks(add_ranks, 2, 5) == [11.0, 11.0]
    with pytest.raises(RankError, match=r"rank 1 raised[\s\S]*ValueError: as planned"):
        run_ranks(fail_on_rank_1, 2)


def test_the_error_of_a_rank_is_reported_before_the_death_of_another():
    with pytest.raises(RankError, match=r"rank 0 raised[\s\S]*ValueError: left alone"):
        run_ranks(die_on_rank_1, 2)


def test_a_lost_port_is_named(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setattr("tests.ranks.free_port", lambda: str(taken.getsockname()[1]))
        with pytest.raises(RankError, match=r"rank 0 raised[\s\S]*EADDRINUSE"):
            run_ranks(add_ranks, 2, 5, timeout=30)
