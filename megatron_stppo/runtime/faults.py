"""Ends that a scheduler must tell apart, by exit code (see docs/running.md)."""

from __future__ import annotations

REQUEUE = 85
DO_NOT_RESTART = 93


class Requeue(RuntimeError):
    """The run has checkpointed and left before its end, because it was given notice; started again, it goes
    on. The door turns it into exit code 85."""


class DoNotRestart(RuntimeError):
    """Starting again would fail again, for example when the budget of non-finite steps is spent.

    The door turns it into exit code 93, which a scheduler's requeue rule must leave alone.
    """
