"""Failures that a scheduler must tell apart, by exit code (see README.md, "Exit codes")."""

from __future__ import annotations

DO_NOT_RESTART = 93


class DoNotRestart(RuntimeError):
    """Starting again would fail again, for example when the budget of non-finite steps is spent.

    The door turns it into exit code 93, which a scheduler's requeue rule must leave alone.
    """
