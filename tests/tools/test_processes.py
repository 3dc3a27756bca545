"""tools/processes.py: what a tool has started ends with it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

from tools.processes import ROOT, run

# the first sleep has lost its parent
TOOL = "from tools.processes import run; run(['sh', '-c', '(sleep 60 & echo $!); sleep 60 & echo $!; wait'])"


def test_a_tool_that_gets_sigterm_ends_the_processes_of_its_programs() -> None:
    with subprocess.Popen([sys.executable, "-c", TOOL], cwd=ROOT, stdout=subprocess.PIPE, text=True) as tool:
        assert tool.stdout is not None
        sleeping = [psutil.Process(int(tool.stdout.readline())) for _ in range(2)]
        tool.send_signal(signal.SIGTERM)
        assert tool.wait(30) == 128 + signal.SIGTERM
    end = time.monotonic() + 10
    while any(map(lives, sleeping)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(lives, sleeping))


def lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.parametrize("program", ["true", "/no/such/program"])
def test_sigterm_ends_a_tool_in_the_usual_way_when_it_runs_no_program(program: str) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with suppress(FileNotFoundError):
        run([program])
    assert signal.getsignal(signal.SIGTERM) == before
