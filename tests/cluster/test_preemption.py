from __future__ import annotations

import ctypes
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_stppo.cluster.launch.process import free_port
from megatron_stppo.cluster.preemption import SIGNALS, PreemptionNotice, ends_at_sigterm, passed_on
from megatron_stppo.config import ConfigError

# A replacement for a training that prints its progress.
PRINTS = """
import pathlib, sys, time
from megatron_stppo.base.printing import drop_unwritable
from megatron_stppo.cluster.preemption import PreemptionNotice
drop_unwritable("stdout", "stderr")
notice = PreemptionNotice(margin=0)
print("ready", flush=True)
while not notice.due(bool):
    time.sleep(0.05)
for _ in range(3):
    print("saved", flush=True)
    print("saved", file=sys.stderr, flush=True)
pathlib.Path(sys.argv[1]).write_text(notice.reason)
"""


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = [(number, signal.getsignal(number)) for number in SIGNALS]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a script ignores it
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before:
        signal.signal(number, handler)


def alone(flag: bool) -> bool:
    return flag


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_takes_effect_at_the_next_check_and_a_second_one_does_nothing(
    number: signal.Signals,
) -> None:
    notice = PreemptionNotice(margin=0)
    assert not notice.due(alone)
    os.kill(os.getpid(), number)
    assert notice.due(alone)
    assert notice.reason == number.name
    for again in (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP):
        os.kill(os.getpid(), again)
        assert signal.getsignal(again) == signal.SIG_IGN, "children would be killed by it"


def test_signals_that_the_launcher_has_blocked_are_received() -> None:
    code = PRINTS.replace('print("saved", ', "print(notice.reason, ")
    blocking = f"import signal, os, sys; signal.pthread_sigmask(signal.SIG_BLOCK, [{signal.SIGUSR1:d}]); "
    blocking += f"os.execv(sys.executable, [sys.executable, '-c', {code!r}, os.devnull])"
    with subprocess.Popen((sys.executable, "-c", blocking), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGUSR1)
        out, _ = process.communicate(timeout=20)
    assert out.split() == ["SIGUSR1"] * 3


def test_a_handler_that_a_compiler_has_installed_since_is_replaced() -> None:
    # As LLVM does at Triton's first compilation: in C, with a handler that does nothing.
    notice = PreemptionNotice(margin=0)
    nothing = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda number: None)
    ctypes.CDLL(None).signal(int(signal.SIGUSR1), nothing)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert not notice.reason, "this handler has not replaced Python's"
    assert not notice.due(alone)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert notice.due(alone) and notice.reason == "SIGUSR1"


def test_ctrl_c_is_a_notice_and_a_second_one_ends_the_process(capfd: pytest.CaptureFixture[str]) -> None:
    notice = PreemptionNotice(margin=0)
    os.kill(os.getpid(), signal.SIGINT)
    assert (
        "SIGINT: writing a checkpoint after this iteration, then ending; a second Ctrl-C"
        in capfd.readouterr().err
    )
    assert notice.due(alone) and notice.reason == "SIGINT"
    assert signal.getsignal(signal.SIGINT) == signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_ctrl_c_after_the_notice_of_another_rank_does_not_end_this_one() -> None:
    notice = PreemptionNotice(margin=0)
    assert notice.due(lambda mine: True) and notice.reason == "another rank received notice"
    os.kill(os.getpid(), signal.SIGINT)


def test_sigterm_is_a_notice_again_after_the_start() -> None:
    notice = PreemptionNotice(margin=0)
    with ends_at_sigterm():
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    os.kill(os.getpid(), signal.SIGTERM)
    assert notice.reason == "SIGTERM"
    PreemptionNotice(margin=0)
    with ends_at_sigterm():
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "the second Ctrl-C"


JOINS = """
from datetime import timedelta
import torch
from megatron_stppo.cluster.launch import rendezvous
from megatron_stppo.cluster.launch import process
from megatron_stppo.cluster.preemption import PreemptionNotice
notice = PreemptionNotice(margin=0)
print("ready", flush=True)
process.join(timedelta(minutes=5))
"""


@pytest.mark.parametrize(("rank", "seconds"), [("0", 0.0), ("1", 1.0)])
def test_a_rank_that_waits_for_a_dead_one_at_its_start_ends_at_sigterm(rank: str, seconds: float) -> None:
    """seconds: in which it begins to wait."""
    given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    command = [sys.executable, "-c", JOINS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | given) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        try:
            time.sleep(seconds)
            process.send_signal(signal.SIGTERM)
            assert process.wait(40) == -signal.SIGTERM
        finally:
            process.kill()


def test_signals_that_nohup_ignores_stay_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    notice = PreemptionNotice(margin=0)
    os.kill(os.getpid(), signal.SIGHUP)
    assert not notice.due(alone)


def test_a_closed_terminal_is_a_notice_and_later_output_raises_no_error(tmp_path: Path) -> None:
    child, terminal = pty.fork()
    if not child:
        os.execv(sys.executable, [sys.executable, "-c", PRINTS, str(tmp_path / "reason")])
    assert os.read(terminal, 5) == b"ready"
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (tmp_path / "reason").read_text() == "SIGHUP"


def test_a_pipe_whose_reader_is_ended_by_the_same_ctrl_c_does_not_end_the_run(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PRINTS, str(tmp_path / "reason")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as child:
        assert child.stdout is not None and child.stdout.read(5) == b"ready"
        child.stdout.close()
        child.send_signal(signal.SIGINT)
    assert child.returncode == 0
    assert (tmp_path / "reason").read_text() == "SIGINT"


def test_signals_are_passed_on_to_a_process_from_its_start_unless_the_program_handles_them() -> None:
    def start() -> subprocess.Popen[bytes]:
        os.kill(os.getpid(), signal.SIGHUP)
        return subprocess.Popen(("sleep", "60"))

    with passed_on(start) as process:
        assert process.wait(30) == -signal.SIGHUP
    handled = list[int]()
    before = signal.signal(signal.SIGHUP, lambda number, frame: handled.append(number))
    assert before == signal.SIG_DFL, "it is the program's own again"
    with passed_on(start) as process:
        process.kill()
        assert (process.wait(30), handled) == (-signal.SIGKILL, [signal.SIGHUP])


def test_notice_comes_when_one_more_iteration_would_end_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is 1040: an iteration follows one of 30 s that ends at 1000, and none one of 20 s at 1030."""
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1100")
    times = iter((970.0, 1000.0, 1010.0, 1030.0))  # the start, and the ends of iterations of 30, 10 and 20 s
    monkeypatch.setattr(time, "time", lambda: next(times))
    notice = PreemptionNotice(margin=60)
    assert [notice.due(alone) for _ in range(3)] == [False, False, True]
    assert notice.reason == "SLURM_JOB_END_TIME is near"


def test_notice_comes_before_an_evaluation_that_would_end_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is 1060. Iterations take 10 s, the first evaluation 30 s; a second one would end at 1070."""
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1100")
    times = iter((980.0, 990.0, 1059.0, 1061.0))
    monkeypatch.setattr(time, "time", lambda: next(times))
    notice = PreemptionNotice(margin=40)
    assert not notice.due(alone, begins="evaluation")
    assert (notice.now(), notice.now()) == ("", "SLURM_JOB_END_TIME is near"), "one in progress is abandoned"
    times = iter((980.0, 990.0, 1020.0, 1030.0, 1040.0))
    monkeypatch.setattr(time, "time", lambda: next(times))
    notice = PreemptionNotice(margin=40)
    assert not notice.due(alone, begins="evaluation"), "how long one takes is not known yet"
    assert not notice.due(alone, ended="evaluation")
    assert not notice.due(alone)
    assert notice.due(alone, begins="evaluation")


def test_an_end_time_that_is_not_a_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", "tomorrow")
    with pytest.raises(ConfigError, match="SLURM_JOB_END_TIME=tomorrow: is not a time"):
        PreemptionNotice(margin=0)
