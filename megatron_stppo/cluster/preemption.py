"""Preemption by a signal or by the end of the allocation. The loop checks for it between iterations, and an
evaluation between engine steps."""

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TypeVar

from megatron_stppo.base.errors import ConfigError

OF_A_SCHEDULER = (signal.SIGUSR1, signal.SIGTERM)
OF_A_TERMINAL = (signal.SIGINT, signal.SIGHUP)  # Ctrl-C, and a closed terminal
SIGNALS = OF_A_SCHEDULER + OF_A_TERMINAL
ENDING = (signal.SIGTERM, *OF_A_TERMINAL)
END = "SLURM_JOB_END_TIME"
Text = TypeVar("Text", str, bytes)


class PreemptionNotice:
    """Whether the loop must write a checkpoint and leave at the end of an iteration.

    Slurm sends SIGUSR1 some time before the end (#SBATCH --signal) and SIGTERM when it takes the nodes away.
    A terminal sends SIGINT at Ctrl-C and SIGHUP when it closes. The handler sets a flag, which the loop reads
    between iterations. After a SIGINT, the next SIGINT or SIGTERM ends the process at once (torchrun sends
    SIGTERM at a second Ctrl-C). A terminal's signals that the process ignored at its start (nohup, background
    job of a script) stay ignored.

    A compiler may take SIGUSR1 away: at the first kernel that Triton compiles, LLVM installs a handler of its
    own, which does nothing and of which Python does not know. So `due` listens again, as the loop does when
    the engine has started; a SIGUSR1 between the compilation and that moment is lost.

    An iteration may be longer than the time between Slurm's signal and the end. Therefore the run also leaves
    without a signal, if what comes next, an iteration or an evaluation, would end less than `margin` seconds
    before SLURM_JOB_END_TIME, or after it, if it takes as long as the last one. An evaluation in progress is
    abandoned after any signal, because nobody knows how long it still takes, and `margin` seconds before that
    end.
    """

    def __init__(
        self,
        margin: float,
        then: str = "writing a checkpoint after this iteration, then ending",
        signals: Sequence[signal.Signals] = SIGNALS,
    ) -> None:
        """Install the handlers of `signals`. then: what the process does after a signal, for the message.

        Raises ConfigError if SLURM_JOB_END_TIME is not a number.
        """
        self.reason, self._then, self._signals = "", then, signals
        self._end = _end_of_allocation()
        self._margin, self._asked = margin, time.time()
        self._took: dict[str, float] = {}  # seconds of the last iteration and of the last evaluation
        for number in signals:
            if number in OF_A_SCHEDULER or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._note)
        # a process inherits the signals that its launcher has blocked, and would never receive them
        signal.pthread_sigmask(signal.SIG_UNBLOCK, OF_A_SCHEDULER)

    def due(self, agree: Callable[[bool], bool], ended: str = "iteration", begins: str = "iteration") -> bool:
        """Return whether to leave now. Call it after each iteration and after each evaluation.

        `agree` returns True on all ranks if its argument is True on any rank. After the first True, further
        signals are ignored, except a second Ctrl-C.
        ended: what has run since the last call, "iteration" or "evaluation". begins: what comes next.
        """
        self.listen()
        now = time.time()
        self._took[ended], self._asked = now - self._asked, now
        if self._end is not None and now + self._took.get(begins, 0.0) > self._end - self._margin:
            self.reason = self.reason or f"{END} is near"
        leave = agree(bool(self.reason))
        if leave:
            self.reason = self.reason or "another rank received notice"
            for number in SIGNALS:
                if number != signal.SIGINT and signal.getsignal(number) != signal.SIG_DFL:
                    signal.signal(number, signal.SIG_IGN)
        return leave

    def now(self) -> str:
        """Return why this rank must leave without waiting for the end of an evaluation, or ""."""
        if self._end is not None and time.time() > self._end - self._margin:
            self.reason = self.reason or f"{END} is near"
        return self.reason

    def listen(self) -> None:
        """Install the handler of SIGUSR1 again. Call it after something may have compiled."""
        if signal.SIGUSR1 in self._signals:
            signal.signal(signal.SIGUSR1, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.reason = signal.Signals(number).name
        if number == signal.SIGINT:  # a second signal ends the process at once
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if os.environ.get("RANK", "0") == "0":
            then = "; a second Ctrl-C ends the run at once" if number == signal.SIGINT else ""
            text = f"megatron-stppo: {self.reason}: {self._then}{then}\n"
            with suppress(OSError):  # the disk of stderr is full, or its pipe has no reader
                os.write(2, text.encode())  # not print(): the signal may have interrupted one


@contextmanager
def passed_on(
    start: Callable[[], subprocess.Popen[Text]], signals: Sequence[signal.Signals] = ENDING
) -> Iterator[subprocess.Popen[Text]]:
    """Start a process, and pass on to it `signals` to this one, which would end before its checkpoint.

    Signals that this process ignores or handles itself are not passed on. In the block, read the output of
    the process: it goes on until its checkpoint is written. start: give it a session of its own, so that it
    gets a Ctrl-C once.
    """
    started, early = list[subprocess.Popen[Text]](), list[int]()

    def pass_on(number: int, frame: FrameType | None) -> None:
        early.append(number)
        for process in started:
            process.send_signal(number)

    is_main = threading.current_thread() is threading.main_thread()
    unhandled = (signal.SIG_DFL, signal.default_int_handler)
    before = {n: signal.signal(n, pass_on) for n in signals if is_main and signal.getsignal(n) in unhandled}
    try:
        with start() as process:
            started.append(process)
            for number in early[:]:  # while it was started
                process.send_signal(number)
            yield process
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def ends_at_sigterm() -> Iterator[None]:
    """Context in which SIGTERM ends this process at once, also one that was noted before.

    It is for a start, while nothing is lost. A rank that waits in torch for one that has died does not run
    Python's handlers; torchrun and Slurm would kill it 30 s after their SIGTERM.
    """
    if threading.current_thread() is not threading.main_thread():  # Python's handlers belong to that one
        yield
        return
    handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    notice = getattr(handler, "__self__", None)
    if isinstance(notice, PreemptionNotice) and notice.reason == signal.SIGTERM.name:
        os.kill(os.getpid(), signal.SIGTERM)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) != signal.SIG_DFL:  # else after a first Ctrl-C
            signal.signal(signal.SIGTERM, handler)


def _end_of_allocation() -> float | None:
    """Return the end of the allocation in seconds since 1970, or None if Slurm does not give one."""
    text = os.environ.get(END)
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]+", text):
        raise ConfigError(f"{END}={text}: is not a time in seconds since 1970; unset it")
    return float(text)
