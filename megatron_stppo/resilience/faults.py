"""Ends that a scheduler must tell apart, by exit code (see docs/cluster.md)."""

from __future__ import annotations

CRASH = 1
REQUEUE = 85
DO_NOT_RESTART = 93


class Requeue(RuntimeError):
    """The run has checkpointed and left before its end, because it was given notice; started again, it goes
    on. The door turns it into exit code 85."""


class ToolsStayAway(Requeue):
    """Tools did not answer for environment.tool_wait seconds. Equal on all ranks; a training run checkpoints
    before it ends."""


class TooManyFailures(RuntimeError):
    """More episodes failed than environment.max_failure_rate allows. The door turns it into exit code 1 and
    one line: the reason is in the message, and a stack of this program says nothing about it."""


class DoNotRestart(RuntimeError):
    """Starting again would fail again, for example when the budget of non-finite steps is spent.

    The door turns it into exit code 93, which a scheduler's requeue rule must leave alone.
    """
