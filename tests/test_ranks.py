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
        raise ValueError("told to")
    dist.barrier()


def test_every_rank_returns_its_result_and_a_failing_rank_ends_the_others():
    assert run_ranks(add_ranks, 2, 5) == [11.0, 11.0]
    with pytest.raises(RankError, match=r"rank 1 raised[\s\S]*ValueError: told to"):
        run_ranks(fail_on_rank_1, 2)
