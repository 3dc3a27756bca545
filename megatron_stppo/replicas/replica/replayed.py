"""A replica that repeats a recorded one: what is applied before which engine step comes from its journal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron_stppo.base.errors import CannotServe
from megatron_stppo.replicas.replica.news import BEAT, News, NewsSource
from megatron_stppo.replicas.wire.journal import Line
from megatron_stppo.rollout.episodes.play import Player

DIFFERS = "this run differs from the recorded one"


@dataclass(kw_only=True)
class Replayed(NewsSource):
    """Repeats a recorded run: everything is applied before the engine step that a line of its journal names.

    Messages and answers arrive at other times than in the recorded run. Each is kept until its step, and the
    engine waits for those that are due. The replica then makes the same engine steps with the same requests.
    """

    lines: Iterator[Line]
    patience: float  # seconds to wait for what is due

    def __post_init__(self) -> None:
        self._line = next(self.lines, None)

    def _next(self, player: Player) -> News:
        return self._after(player) if self._line is None else self._due(player, self._line)

    def _due(self, player: Player, line: Line) -> News:
        """Return what the line names if its step has come."""
        if player.steps < line.step:
            if not player.runs:
                raise CannotServe(
                    f"the journal continues before engine step {line.step}, but no turn is generated after "
                    f"step {player.steps}; {DIFFERS}"
                )
            return self._news()
        version = line.version
        updates = version is not None and self.version >= 0
        if (line.hold or updates) and not self._await(
            line, "announcement of an update", lambda: self.announced is not None
        ):
            return self._news(waits=True)
        if version is not None and updates:
            self._tell_ready(version)
        assigned, answers = set(line.assigned), set(line.answers)
        if not (
            (version is None or self._await(line, f"version {version}", lambda: self._offers(version)))
            and self._await(line, f"episodes {line.assigned}", lambda: assigned <= self.assigned.keys())
            and self._await(line, f"answers for {line.answers}", lambda: answers <= self.answers.keys())
        ):
            return self._news(waits=True)
        self._line = next(self.lines, None)
        receive = self.to_receive if version is not None else None
        waits = self._line is not None and self._line.step == line.step
        return self._news(line.assigned, line.answers, line.hold, receive, waits)

    def _offers(self, version: int) -> bool:
        return self.to_receive is not None and self.to_receive.version == version

    def _await(self, line: Line, what: str, has_arrived: Callable[[], bool]) -> bool:
        return self._wait(
            f"the journal has {what} before engine step {line.step}, but nothing came", has_arrived
        )

    def _wait(self, why: str, is_over: Callable[[], bool]) -> bool:
        """Wait until is_over(), and return True; False if the replica must end, or give weights, before.

        Raises CannotServe if it takes too long.
        """
        began = time.monotonic()
        while not is_over():
            if self.end is not None or self.to_give is not None:
                return False
            if time.monotonic() - began > self.patience:
                raise CannotServe(f"{why} for {self.patience:g} s; {DIFFERS}")
            self.look(BEAT)
        return True

    def _after(self, player: Player) -> News:
        """After the last line: complete the turns that are generated, then wait for the end of the run."""
        if not player.runs:
            left = sorted({*player.playing, *self.assigned})
            ends = f"the journal ends after engine step {player.steps}"
            self._wait(
                f"{ends}, and episodes are left, such as {left[:1]},",
                lambda: not (player.playing or self.assigned),
            )
            self.look(BEAT)
        return self._news()
