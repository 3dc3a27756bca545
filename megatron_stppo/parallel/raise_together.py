"""Raise an exception on all ranks if any rank failed.

A rank that raised alone would leave the others waiting in their next collective. So a rank catches its
exception, and all ranks exchange a record of it, a string or a frozen dataclass. Without a failure this costs
the all-reduce of one number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from megatron_stppo.parallel.collectives import Group, any_rank, gather_records

Failure = TypeVar("Failure")


def raise_together(
    own: Failure | None,
    exception: Callable[[dict[int, Failure]], BaseException],
    type: type[Failure],
    group: Group = None,
    *,
    cause: BaseException | None = None,
) -> None:
    """Raise exception({rank: failure}) on every rank if any rank passes a failure. Collective.

    own: this rank's failure, or None. exception: makes the exception from the failures of all ranks that have
    one, in rank order. It may return `cause`, to raise this rank's own exception. type: the type of the
    failures. cause: this rank's own exception, which becomes the cause of the one that is raised.
    Example: if rank 1 of 2 passes "disk full" and `exception` is lambda failures: OSError(by_rank(failures)),
    both ranks raise OSError("rank 1: disk full").
    """
    if failures := gather_failures(own, type, group):
        error = exception(failures)
        raise error from (error.__cause__ if error is cause else cause)


def gather_failures(own: Failure | None, type: type[Failure], group: Group = None) -> dict[int, Failure]:
    """Return {rank: failure} of the ranks that pass one, in rank order, on every rank. Collective."""
    if not any_rank(own is not None, group):
        return {}
    gathered = gather_records([] if own is None else [own], type, group)
    return {rank: of_rank[0] for rank, of_rank in enumerate(gathered) if of_rank}


def by_rank(texts: Mapping[int, str]) -> str:
    """Return one line. Example: by_rank({0: "disk full", 2: "late"}) is "rank 0: disk full; rank 2: late"."""
    return "; ".join(f"rank {rank}: {text}" for rank, text in texts.items())


def first(texts: Mapping[int, str]) -> str:
    """Return the text of the first rank that has one. Example: first({1: "late", 2: "full"}) is "late"."""
    return next(iter(texts.values()))
