"""Errors of torch's collective loads, as exceptions that the program handles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint.api import CheckpointException

from megatron_stppo.messages import one_line
from megatron_stppo.parallel.raise_together import by_rank


@contextmanager
def as_exception(what: str, exception: Callable[[str], Exception]) -> Iterator[None]:
    """Raise `exception` in place of torch's CheckpointException, with the failures of the ranks.

    torch raises it on all ranks, but it is no Exception: `except Exception` does not catch it, and the
    process would end without an exit code, a reason in exit.json and torchrun's error file.
    Example: "step_1/actor: cannot be loaded (rank 1: OSError: [Errno 116] Stale file handle)".
    """
    try:
        yield
    except CheckpointException as error:
        causes = {
            rank: one_line(f"{type(cause).__name__}: {cause}") for rank, (cause, _) in error.failures.items()
        }
        raise exception(f"{what} ({by_rank(causes)})") from error
