from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from megatron_stppo.base.types import Message, Task, Trajectory, Turn
from megatron_stppo.parallel.collectives import (
    all_gather_bytes,
    all_reduce_sum,
    any_rank,
    broadcast_bytes,
    decode,
    encode,
    gather_records,
)
from tests.ranks import run_ranks


def trajectory(index: int) -> Trajectory:
    asked = Task("game", (Message("user", "?"),), ("Paris",), "train", index, {"hops": [1, 2]})
    return Trajectory(
        asked, (1, 2), (Turn((5, 9), (-0.1, -2.0), (7,), 0.5, ((4, 1), (5, 1))),), "ok", group=index
    )


def exchange() -> dict[str, Any]:
    rank = dist.get_rank()
    pair = [dist.new_group([0, 2]), dist.new_group([1])][rank % 2]
    kept = torch.tensor([rank, 1.5])
    return {
        "gathered": gather_records([trajectory(i) for i in range(rank)], Trajectory),
        "broadcast": broadcast_bytes(b"from one" if rank == 1 else None, 1),
        "empty": broadcast_bytes(b"" if rank == 0 else None, 0),
        "group": broadcast_bytes(b"%d" % rank, pair.size() - 1, pair),
        "bytes": all_gather_bytes(b"x" * rank),
        "nothing": all_gather_bytes(b""),
        "sum": (all_reduce_sum(kept).tolist(), kept.tolist()),
        "one raised": any_rank(rank == 2),
        "none raised": any_rank(False),
    }


def test_ranks_exchange_records_bytes_sums_and_flags() -> None:
    for rank, got in enumerate(run_ranks(exchange, 3)):
        assert got["gathered"] == [[], [trajectory(0)], [trajectory(0), trajectory(1)]]
        assert (got["broadcast"], got["empty"]) == (b"from one", b"")
        assert got["group"] == (b"1" if rank == 1 else b"2"), "the source is a rank of the group"
        assert (got["bytes"], got["nothing"]) == ([b"", b"x", b"xx"], [b"", b"", b""])
        assert got["sum"] == ([3.0, 4.5], [float(rank), 1.5]), "the argument is not changed"
        assert (got["one raised"], got["none raised"]) == (True, False)


def test_a_record_of_another_shape_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        decode(encode({"token_ids": ["5"], "rollout_logprob": [-0.1]}), Turn)
    with pytest.raises(msgspec.ValidationError):
        decode(encode(trajectory(0)), Turn)


def test_records_survive_bitwise() -> None:
    turn = Turn((5,), (-0.1234567890123456789,), (), 1e-300, ((2**40, 1),))
    assert decode(encode(turn), Turn) == turn
