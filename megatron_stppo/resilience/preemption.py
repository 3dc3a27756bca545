"""Notice to leave: a signal, or the end of the allocation. Nothing is interrupted; the loop asks."""

from __future__ import annotations

import os
import re
import select
import signal
import time
from collections.abc import Callable
from types import FrameType

from megatron_stppo.config import ConfigError

OF_A_SCHEDULER = (signal.SIGUSR1, signal.SIGTERM)
OF_A_TERMINAL = (signal.SIGINT, signal.SIGHUP)  # Ctrl-C, and the end of the session
SIGNALS = OF_A_SCHEDULER + OF_A_TERMINAL
OUTPUTS = (1, 2)
DYING = 0.2  # seconds that a `| tee` takes to end of the same Ctrl-C
END = "SLURM_JOB_END_TIME"


class PreemptionNotice:
    """Tells the loop, at the end of an iteration, to checkpoint and leave.

    Slurm sends SIGUSR1 some time before the end (#SBATCH --signal) and SIGTERM when it takes the nodes away.
    A terminal sends SIGINT at Ctrl-C and SIGHUP when it closes. The handler sets a flag, read between
    iterations. After a SIGINT the next SIGINT or SIGTERM ends the process at once (torchrun answers a second
    Ctrl-C with SIGTERM). Signals of a terminal that the process was started to ignore (nohup, a script's
    background job) stay ignored.

    Before SLURM_JOB_END_TIME the notice comes by itself, as soon as another iteration as long as the last
    would end within `margin` seconds of it: an iteration may be longer than Slurm's warning.
    """

    def __init__(self, margin: float) -> None:
        """Handles SIGNALS from here on. Raises ConfigError if SLURM_JOB_END_TIME is not a number."""
        self.reason = ""
        self._end = _end_of_allocation()
        self._margin, self._asked = margin, time.time()
        for number in SIGNALS:
            if number in OF_A_SCHEDULER or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._note)

    def due(self, agree: Callable[[bool], bool]) -> bool:
        """Whether to leave now; asked once per iteration. `agree` makes one rank's True everyone's.

        Once the answer is yes, further signals are ignored, except for a second Ctrl-C.
        """
        now = time.time()
        spent, self._asked = now - self._asked, now
        if self._end is not None and now + spent > self._end - self._margin:
            self.reason = self.reason or f"{END} is near"
        leave = agree(bool(self.reason))
        if leave:
            self.reason = self.reason or "another rank was given notice"
            for number in SIGNALS:
                if number != signal.SIGINT and signal.getsignal(number) != signal.SIG_DFL:
                    signal.signal(number, signal.SIG_IGN)
        return leave

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.reason = signal.Signals(number).name
        if number == signal.SIGINT:  # the kernel ends the process, whatever it is doing
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if number in OF_A_TERMINAL:
            _drop_dead_outputs()
        if os.environ.get("RANK", "0") == "0":
            then = "; a second Ctrl-C ends it at once" if number == signal.SIGINT else ""
            text = f"megatron-stppo: {self.reason}: checkpoints after this iteration and ends{then}\n"
            os.write(OUTPUTS[1], text.encode())  # print() may be what was interrupted


def _drop_dead_outputs() -> None:
    """Sends to nowhere what would be printed to a terminal that is closed or to a pipe that nobody reads: the
    error of the next print would end the run."""
    time.sleep(DYING)
    outputs = select.poll()
    for output in OUTPUTS:
        outputs.register(output, 0)  # errors are always reported
    dead = outputs.poll(0)
    if dead:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for output, _ in dead:
            os.dup2(nowhere, output)
        os.close(nowhere)


def _end_of_allocation() -> float | None:
    """Seconds since 1970; None where Slurm names no end."""
    text = os.environ.get(END)
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]+", text):
        raise ConfigError(f"{END}={text}: is no time in seconds since 1970; unset it")
    return float(text)
