"""Errors that a user or a scheduler can act on: the command line prints one line for them, without a stack
trace, and ends with the exit code of the error (docs/cluster.md)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_stppo.base.types import Trajectory


class Ending(Exception):
    """The base of these errors. Other errors are crashes: their stack trace is printed."""

    exit_code: int


class ConfigError(Ending, ValueError):
    """An error that the user can fix: the message names field, value and remedy."""

    exit_code = 2


class CheckpointError(Ending, RuntimeError):
    """No checkpoint can be read, or none can be written any more; the message has the reason.

    A restart would fail in the same way.
    """

    exit_code = 93


class Requeue(Ending, RuntimeError):
    """The run was preempted: it has written a checkpoint and left before its end. A new start resumes it."""

    exit_code = 85


class ToolsStayAway(Requeue):
    """Tools did not respond for environment.tool_wait seconds.

    All ranks raise the same error. A training run writes a checkpoint before it ends.
    """


class EngineLost(Requeue):
    """vLLM failed on all ranks of an engine on a GPU, where no new engine is built in the same process.

    All ranks raise the same error. A training run writes a checkpoint before it ends.
    """


class Abandoned(Requeue):
    """The run must leave, and has abandoned the episodes of an evaluation.

    All ranks raise the same error. The evaluation counts as skipped.
    """


class TooManyFailures(Ending, RuntimeError):
    """More episodes failed than environment.max_failure_rate allows.

    All ranks raise the same error. The cause is outside this program, and the message contains it. A training
    run writes a checkpoint before it ends, and a resumed run plays these episodes again.
    own: the trajectories that were left on this rank.
    """

    exit_code = 1
    own: Sequence[Trajectory] = ()


class CannotServe(Ending, RuntimeError):
    """A replica cannot continue: the trainer is gone, weights did not arrive, or the like.

    The run continues without the replica.
    """

    exit_code = 1


class DoNotRestart(Ending, RuntimeError):
    """A new start would fail again, for example when more steps than run.nonfinite_budget were not finite.

    A scheduler must not requeue a run that ends with this error.
    """

    exit_code = 93


class CannotRecord(DoNotRestart):
    """The disk refuses what the run has to write, for example because it is full."""

    def __init__(self, path: Path, reason: OSError | str) -> None:
        """path: the file, or the run's folder. reason: the system's, or its text."""
        why = reason if isinstance(reason, str) else reason.strerror
        super().__init__(
            f"{path}: cannot be written ({why}); make space for it, and continue the run with --resume"
        )
