"""The start of the planner's process, and the command `plan` in it."""

from __future__ import annotations

import io
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from unittest import mock

from megatron_stppo.commands.open_run import importing


def prepare() -> None:
    with importing(quiet=True, engine=False, device="meta"):  # as the command: a second call does nothing
        import megatron_stppo.plan.outlook
        import megatron_stppo.plan.report  # noqa: F401


@dataclass(frozen=True)
class Said:
    """What subprocess.run returns."""

    returncode: int
    stdout: str
    stderr: str


def command(planner: ProcessPoolExecutor, *arguments: str) -> Said:
    """Run `megatron-stppo plan` in the planner's process, without the imports of a new one."""
    return planner.submit(_command, arguments).result()


def _command(arguments: tuple[str, ...]) -> Said:
    from megatron_stppo.__main__ import run

    out, err = io.StringIO(), io.StringIO()
    with mock.patch.object(sys, "argv", ["megatron-stppo", "plan", *arguments]):
        with redirect_stdout(out), redirect_stderr(err):
            code = run()
    return Said(code, out.getvalue(), err.getvalue())
