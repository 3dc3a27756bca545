from __future__ import annotations

from dataclasses import dataclass
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
    by_rank,
    decode,
    encode,
    gather_failures,
    gather_records,
    raise_together,
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


@dataclass(frozen=True)
class Full:
    """A record with a number, as a rank could send."""

    disk: str
    bytes: int


def summary(failures: dict[int, str]) -> OSError:
    return OSError(by_rank(failures))


def caught(own: BaseException | None, keeps_own: bool = False) -> tuple[str, str, str]:
    """Return type, message and cause of what raise_together raises."""

    def exception(failures: dict[int, str]) -> BaseException:
        return own if keeps_own and own is not None else summary(failures)

    try:
        raise_together(str(own) if own else None, exception, str, cause=own)
    except Exception as error:
        return type(error).__name__, str(error), repr(error.__cause__)
    return "", "", ""


def every_case() -> dict[str, object]:
    rank = dist.get_rank()
    pair = [dist.new_group([0, 2]), dist.new_group([1])][rank % 2]
    own = ValueError(f"no {rank}") if rank else None
    full = Full("/x", rank) if rank == 2 else None
    return {
        "none": caught(None),
        "two": caught(own),
        "own": caught(own, keeps_own=True),
        "records": gather_failures(full, Full),
        "pair": gather_failures("odd" if rank == 2 else None, str, pair),
        "empty text": gather_failures("" if rank == 0 else None, str),
    }


def test_a_failure_of_any_rank_is_raised_on_all_with_the_ranks_that_failed() -> None:
    for rank, got in enumerate(run_ranks(every_case, 3)):
        own = f"ValueError('no {rank}')" if rank else "None"
        assert got["none"] == ("", "", "")
        assert got["two"] == ("OSError", "rank 1: no 1; rank 2: no 2", own)
        assert got["records"] == {2: Full("/x", 2)}
        assert got["pair"] == ({1: "odd"} if rank != 1 else {}), "ranks of the group are numbered in it"
        assert got["empty text"] == {0: ""}, "a failure without a text is one too"


def test_a_rank_may_raise_its_own_exception_while_the_others_raise_the_common_one() -> None:
    first, second, third = (got["own"] for got in run_ranks(every_case, 3))
    assert first == ("OSError", "rank 1: no 1; rank 2: no 2", "None")
    assert second == ("ValueError", "no 1", "None")
    assert third == ("ValueError", "no 2", "None")


def goes_on() -> int:
    """A rank that failed and one that did not leave the collective together, and can use the next one."""
    own = "odd" if dist.get_rank() else None
    try:
        raise_together(own, summary, str)
    except OSError:
        pass
    return len(gather_failures(own, str))


def test_the_ranks_are_in_step_after_it() -> None:
    assert run_ranks(goes_on, 2) == [1, 1]
