"""Wait for tools that do not answer: a call that raises ToolAway is repeated until it returns."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from megatron_stppo.environments.base import ToolAway

T = TypeVar("T")
FIRST, LONGEST = 0.5, 5.0  # seconds between two attempts of a call; doubled each time, up to LONGEST
BEGINS = "%stools do not answer: %s; waiting for up to %.0f s (environment.tool_wait)"
log = logging.getLogger(__name__)


class ToolWait:
    """Repetition of the environment calls of one rollout, for `patience` seconds over all waits.

    A wait begins when a call raises ToolAway while no other call waits. It ends when a waiting call returns.
    Each of the two logs one warning. An instance belongs to one event loop.
    Example: with patience=600, tools are away for 8 minutes and later for 3 minutes. The rollout gives up 2
    minutes into the second wait.
    """

    def __init__(self, patience: float, where: str = "") -> None:
        """where: the prefix of the warnings, such as "rank 4: "."""
        self._patience, self._where = patience, where
        self._waiting = 0  # calls
        self._since: float | None = None  # monotonic time; None outside a wait
        self._spent = 0.0  # seconds, over the waits that have ended
        self.gave_up = ""  # the reason for giving up, in one line; empty before

    def renew(self) -> None:
        """Begin a new rollout: waits that have ended no longer count. May be called by any thread."""
        self._spent = 0.0

    async def call(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Return the result of attempt(), which is called again while it raises ToolAway.

        Raises ToolAway when the patience is spent. Other exceptions of attempt() are passed on.
        """
        pause, waits = FIRST, False
        try:
            while True:
                try:
                    result = await attempt()
                    if waits:
                        self._end(f"{self._where}tools answer again after %.0f s")
                    return result
                except ToolAway as away:
                    self._begin(str(away))
                    self._waiting, waits = self._waiting + (not waits), True
                    if (left := self._left()) <= 0:
                        self.gave_up = self.gave_up or gave_up(self._patience, str(away))
                        raise
                await asyncio.sleep(min(pause, left))
                pause = min(2 * pause, LONGEST)
        finally:
            self._waiting -= waits
            if waits and not self._waiting:
                self._end("")  # the last waiting call failed for another reason

    def _begin(self, why: str) -> None:
        if self._since is None:
            self._since = time.monotonic()
            if (left := self._left()) > 0:
                log.warning(BEGINS, self._where, why, left)

    def _end(self, text: str) -> None:
        if self._since is not None:
            seconds, self._since = time.monotonic() - self._since, None
            self._spent += seconds
            if text:
                log.warning(text, seconds)

    def _left(self) -> float:
        now = time.monotonic()
        return self._patience - self._spent - (now - (self._since or now))


def gave_up(patience: float, why: str) -> str:
    return f"tools did not answer for {patience:g} s (environment.tool_wait): {why}"
