"""tools/processes.py: what a tool has started ends with it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import psutil

from tools.processes import ROOT

TOOL = "from tools.processes import run; run(['sh', '-c', 'sleep 60 & echo $!; wait'])"


def test_a_tool_that_gets_sigterm_ends_the_processes_of_its_programs() -> None:
    with subprocess.Popen([sys.executable, "-c", TOOL], cwd=ROOT, stdout=subprocess.PIPE, text=True) as tool:
        assert tool.stdout is not None
        sleeping = psutil.Process(int(tool.stdout.readline()))
        tool.send_signal(signal.SIGTERM)
        assert tool.wait(30) == 128 + signal.SIGTERM
    end = time.monotonic() + 10
    while sleeping.is_running() and sleeping.status() != psutil.STATUS_ZOMBIE and time.monotonic() < end:
        time.sleep(0.05)
    assert not sleeping.is_running() or sleeping.status() == psutil.STATUS_ZOMBIE
