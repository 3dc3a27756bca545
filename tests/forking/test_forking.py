from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.forking import stand_in
from tests.forking.server import READ_AT_START

ROOT = Path(__file__).parents[2]
# A program is forked if these are those of the tests.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name.startswith(READ_AT_START)}


@pytest.mark.parametrize("end", ["0", "7", "text", "raise", "interrupt"])
@pytest.mark.parametrize("option", [[], ["-u"]])
def test_a_forked_process_gets_what_python_would_give_it_and_ends_alike(
    tmp_path: Path, end: str, option: list[str]
) -> None:
    forked, started = (
        subprocess.run(
            [python, *option, "-m", "tests.forking.seen", end, "--to", "two words", "-u"],
            input="a line\n",
            capture_output=True,
            text=True,
            cwd=tmp_path,
            umask=0o027,
            env=ENVIRONMENT | {"GIVEN": "1=2", "PYTHONPATH": str(ROOT), "HOME": ""},
            check=False,
        )
        for python in (stand_in.python(), sys.executable)
    )
    assert json.loads(forked.stdout) == json.loads(started.stdout)
    assert "two words" in forked.stdout and "1=2" in forked.stdout and "a line" in forked.stdout
    assert forked.returncode == started.returncode
    (said, last), (expected, expected_last) = (done.stderr.split("\n", 1) for done in (forked, started))
    assert said == expected == "said"
    assert last.splitlines()[-1:] == expected_last.splitlines()[-1:]


def numbers(python: str, **variables: str) -> Any:
    command = [python, "-m", "tests.forking.numbers"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, env=ENVIRONMENT | variables, check=True)
    return json.loads(done.stdout)


def test_forked_processes_compute_alike_on_several_threads_and_draw_random_numbers_of_their_own() -> None:
    forked, again, started = (
        numbers(python, OMP_NUM_THREADS="2")
        for python in (stand_in.python(), stand_in.python(), sys.executable)
    )
    assert forked[1] == again[1] == started[1]
    _, used_threads, threads = forked[1]
    assert (used_threads, threads) == (True, 2)
    assert len({*forked[0], *again[0], *started[0]}) == 9


@pytest.mark.parametrize(
    "variables", [{"VLLM_CACHE_ROOT": "x"}, {"VLLM_USE_V2": "1"}, {"PYTHONHASHSEED": "1"}, {"GIVEN": "1"}]
)
def test_python_itself_starts_a_module_if_a_variable_differs_that_is_read_at_import(
    variables: dict[str, str],
) -> None:
    command = [stand_in.python(), "-m", "tests.forking.seen", "executable"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, env=ENVIRONMENT | variables, check=True)
    forked = not {"VLLM_USE_V2", "PYTHONHASHSEED"} & {*variables}
    assert done.stdout.decode().strip() == (stand_in.python() if forked else sys.executable)


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
