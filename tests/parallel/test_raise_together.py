"""All ranks raise if one of them failed, and none raises alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from megatron_stppo.parallel.raise_together import by_rank, gather_failures, raise_together
from tests.ranks import run_ranks


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
