"""Wait for tools that do not answer: a call that raises ToolAway is repeated until it returns."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import torch.distributed as dist

from megatron_stppo.base.errors import ToolsStayAway
from megatron_stppo.config import ConfigError, EnvironmentConfig
from megatron_stppo.environments import choose
from megatron_stppo.environments.base import Environment, ToolAway
from megatron_stppo.parallel.collectives import any_rank
from megatron_stppo.parallel.raise_together import first, gather_failures, raise_together

T = TypeVar("T")
FIRST, LONGEST = 0.5, 5.0  # seconds between two attempts of a call; doubled each time, up to LONGEST
_BEGINS = "%stools do not answer: %s; waiting for up to %.0f s (environment.tool_wait)"
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
                        self.gave_up = self.gave_up or _gave_up(self._patience, str(away))
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
                log.warning(_BEGINS, self._where, why, left)

    def _end(self, text: str) -> None:
        if self._since is not None:
            seconds, self._since = time.monotonic() - self._since, None
            self._spent += seconds
            if text:
                log.warning(text, seconds)

    def _left(self) -> float:
        now = time.monotonic()
        return self._patience - self._spent - (now - (self._since or now))


def open_environment(config: EnvironmentConfig, resume: bool) -> Callable[[], Environment]:
    """Return choose.factory(config). Collective.

    With `resume` it waits, as a rollout does, while a tool of any rank does not answer. If the tools do not
    answer in time, it raises ToolsStayAway on all ranks. In a new run it does not wait and raises
    ConfigError, because the address may be wrong.
    """
    patience, began, waits = config.tool_wait if resume else 0.0, time.monotonic(), False
    while True:
        away: ToolAway | None = None
        misuse: str | None = None
        try:
            make = choose.factory(config)
        except ToolAway as error:
            away = error
        except ConfigError as error:  # perhaps on one node only, which lacks a file or a package
            misuse = str(error)
        raise_together(misuse, lambda found: ConfigError(first(found)), str)
        reasons = list(gather_failures(str(away) if away else None, str).values())
        if not reasons:
            if waits and dist.get_rank() == 0:
                log.warning("tools answer again after %.0f s", time.monotonic() - began)
            return make
        if any_rank(time.monotonic() - began >= patience):
            if resume:
                raise ToolsStayAway(_gave_up(patience, reasons[0]))
            if isinstance(away, ConfigError):
                raise away
            raise ConfigError(f"environment.kind={config.kind}: {reasons[0]}; start its tools")
        if not waits and dist.get_rank() == 0:
            log.warning(_BEGINS, "", reasons[0], patience)
        waits = True
        time.sleep(min(LONGEST, patience))


def _gave_up(patience: float, why: str) -> str:
    return f"tools did not answer for {patience:g} s (environment.tool_wait): {why}"
