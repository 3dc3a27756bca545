from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.forking import stand_in

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("end", ["0", "7", "text"])
def test_a_forked_process_gets_what_python_would_give_it_and_ends_alike(tmp_path: Path, end: str) -> None:
    forked, started = (
        subprocess.run(
            [python, "-m", "tests.forking.seen", end, "--to", "two words"],
            input="a line\n",
            capture_output=True,
            text=True,
            cwd=tmp_path,
            umask=0o027,
            env={"GIVEN": "1=2", "PYTHONPATH": str(ROOT), "HOME": ""},
            check=False,
        )
        for python in (stand_in.python(), sys.executable)
    )
    assert json.loads(forked.stdout) == json.loads(started.stdout)
    assert "two words" in forked.stdout and "1=2" in forked.stdout and "a line" in forked.stdout
    assert (forked.returncode, forked.stderr) == (started.returncode, started.stderr)


def waiting() -> subprocess.Popen[str]:
    """Start a process that waits, and read what it prints first."""
    command = [stand_in.python(), "-m", "tests.forking.seen", "wait"]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline()
    return process


def test_signals_reach_the_process_and_its_end_is_that_of_the_stand_in() -> None:
    with waiting() as process:
        assert process.stdout is not None
        process.send_signal(signal.SIGUSR1)
        assert process.stdout.readline() == "signalled\n"
        process.terminate()
    assert process.returncode == -signal.SIGTERM


def test_a_killed_stand_in_takes_its_process_along() -> None:
    with waiting() as process:
        started = stand_in.processes()
        assert started
        process.kill()
    assert psutil.wait_procs(started, timeout=20)[1] == []


def test_a_program_that_is_not_a_module_is_started_by_python_itself() -> None:
    done = subprocess.run([stand_in.python(), "-c", "import sys; print(sys.executable)"], capture_output=True)
    assert done.stdout.decode().strip() == sys.executable
