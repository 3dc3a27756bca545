"""Notice to leave: a signal, or the end of the allocation. Nothing is interrupted; the loop asks."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from types import FrameType

from megatron_stppo.config import ConfigError

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
END = "SLURM_JOB_END_TIME"


class Notice:
    """Tells the loop, at the end of an iteration, to checkpoint and leave.

    Slurm sends SIGUSR1 some time before the end (#SBATCH --signal) and SIGTERM when it takes the nodes away.
    The handler sets a flag only, which is read between iterations. Before SLURM_JOB_END_TIME the notice comes
    by itself, as soon as another iteration as long as the last would end within `margin` seconds of it: an
    iteration may be longer than Slurm's warning.
    """

    def __init__(self, margin: float) -> None:
        """Takes over both signals of the process, for good. Raises ConfigError for an end that is no time."""
        self.reason = ""
        self._end = _end_of_allocation()
        self._margin, self._asked = margin, time.time()
        for number in SIGNALS:
            signal.signal(number, self._hear)

    def due(self, agree: Callable[[bool], bool]) -> bool:
        """Whether to leave now; asked once per iteration. `agree` makes one rank's True everyone's.

        Once the answer is yes, further signals are ignored, here and by the processes that the save starts.
        """
        now = time.time()
        spent, self._asked = now - self._asked, now
        if self._end is not None and now + spent > self._end - self._margin:
            self.reason = self.reason or f"{END} is near"
        leave = agree(bool(self.reason))
        if leave:
            self.reason = self.reason or "another rank was given notice"
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)
        return leave

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.reason = signal.Signals(number).name


def _end_of_allocation() -> float | None:
    """Seconds since 1970; None where Slurm names no end."""
    text = os.environ.get(END)
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]+", text):
        raise ConfigError(f"{END}={text}: is no time in seconds since 1970; unset it")
    return float(text)
