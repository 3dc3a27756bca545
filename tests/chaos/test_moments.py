"""Orders to die at a moment (moments.py)."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from megatron_stppo.checkpoint import step_folder
from tests.chaos.moments import LEDGER, Orders


def written(orders: Orders, path: Path) -> int:
    """Write a file in a process that is rank 0, and return its exit code."""
    child = os.fork()
    if child == 0:
        orders.follow("rank-0")
        step_folder.write_durably(path, b"{}")
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_an_order_is_obeyed_at_its_moment_and_once(tmp_path: Path) -> None:
    orders = Orders(["rank-0", "replica-0"])
    orders.give("rank-0", LEDGER, 0.5)
    assert written(orders, tmp_path / "MANIFEST.json") == 0 and not orders.obeyed("rank-0")
    assert written(orders, tmp_path / "state.json") == -signal.SIGKILL
    assert orders.obeyed("rank-0") and not orders.obeyed("replica-0")
    assert written(orders, tmp_path / "state.json") == 0, "the process that takes its place"
