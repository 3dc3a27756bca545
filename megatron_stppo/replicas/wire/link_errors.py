"""What the ranks of a program do with an error in a step of a link (weights.py).

On a replica, the rank that has the error raises it, and the replica ends. The trainer's ranks agree over
their default group, because the trainer continues without the replica.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron_stppo.messages import printable
from megatron_stppo.parallel.raise_together import raise_together


class ReplicaLost(RuntimeError):
    """Weights could not be sent to a replica: it died, did not arrive in time, or its rows are wrong.

    All ranks of the trainer raise it together. The trainer's own groups and its other links still work.
    """


def raise_own(name: str, error: Exception | None) -> None:
    """Raise this rank's error, if there is one. name: that of the link's group."""
    if error is not None:
        raise error


def raise_on_all(name: str, error: Exception | None) -> None:
    """Raise the same ReplicaLost on all ranks of the trainer if any of them has an error. Collective.

    name: that of the link's group.
    """
    own = None
    if error is not None:
        own = printable(f"{type(error).__name__}: {error}").partition("\n")[0]
    raise_together(own, lambda found: _lost(name, found), str)


def _lost(name: str, found: Mapping[int, str]) -> ReplicaLost:
    """Return the exception for ranks that failed with these texts. The first of them stands for all."""
    rank, text = next(iter(found.items()))
    return ReplicaLost(f"weights could not be sent to the replica of group {name}: rank {rank}: {text}")
