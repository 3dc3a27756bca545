"""Errors that end a run with an exit code of their own, for the scheduler (see docs/cluster.md)."""

from __future__ import annotations

from pathlib import Path

CRASH = 1
REQUEUE = 85
DO_NOT_RESTART = 93


class Requeue(RuntimeError):
    """The run was preempted: it has written a checkpoint and left before its end. A new start resumes it.

    The command line turns this error into exit code 85.
    """


class ToolsStayAway(Requeue):
    """Tools did not respond for environment.tool_wait seconds.

    All ranks raise the same error. A training run writes a checkpoint before it ends.
    """


class EngineLost(Requeue):
    """vLLM failed on all ranks of an engine on a GPU, where no new engine is built in the same process.

    All ranks raise the same error. A training run writes a checkpoint before it ends.
    """


class TooManyFailures(RuntimeError):
    """More episodes failed than environment.max_failure_rate allows.

    All ranks raise the same error. The command line turns it into exit code 1 and one line. It prints no
    stack trace, because the cause is outside this program, and the message contains it. A training run writes
    a checkpoint before it ends if `resumable`: if a resumed run plays these episodes again.
    """

    resumable = True


class CannotServe(RuntimeError):
    """A replica cannot continue: the trainer is gone, weights did not arrive, or the like.

    The command line turns this error into exit code 1 and one line. The run continues without the replica.
    """


class DoNotRestart(RuntimeError):
    """A new start would fail again, for example when more steps than run.nonfinite_budget were not finite.

    The command line turns this error into exit code 93. A scheduler must not requeue a run that ends with it.
    """


class CannotRecord(DoNotRestart):
    """The disk refuses what the run has to write, for example because it is full."""

    def __init__(self, path: Path, reason: OSError | str) -> None:
        """path: the file, or the run's folder. reason: the system's, or its text."""
        why = reason if isinstance(reason, str) else reason.strerror
        super().__init__(
            f"{path}: cannot be written ({why}); make space for it, and continue the run with --resume"
        )
