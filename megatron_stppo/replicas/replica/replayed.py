"""The news of a replica that repeats a recorded one: everything is applied before the recorded engine step.

Messages and answers arrive at other times than in the recorded run. Each is kept until its step, and the
engine waits for those that are due. The replica then makes the same engine steps with the same requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from megatron_stppo.replicas.replica.inbox import Inbox
from megatron_stppo.replicas.replica.live import BEAT
from megatron_stppo.replicas.replica.news import News, Send
from megatron_stppo.replicas.wire.journal import Journal, Line
from megatron_stppo.replicas.wire.messages import Ready
from megatron_stppo.resilience.faults import CannotServe
from megatron_stppo.rollout.play import Player

DIFFERS = "this run differs from the recorded one"


class Replayed:
    """A NewsSource that follows the lines of a journal, and records what it returns."""

    def __init__(
        self, inbox: Inbox, send: Send, journal: Journal, lines: Iterator[Line], patience: float
    ) -> None:
        """patience: seconds to wait for what is due."""
        self._inbox, self._send, self._journal = inbox, send, journal
        self._lines, self._patience = lines, patience
        self._line = next(lines, None)
        self._joined = False
        self._idle_since: float | None = None  # after the last line

    def next(self, player: Player) -> News:
        """Return the recorded news. Raises CannotServe if the run differs from the recorded one."""
        self._inbox.look(0.0)
        news = self._after(player) if self._line is None else self._due(player, self._line)
        if self._inbox.end is not None:
            return News(end=self._inbox.end)
        self._journal.write(news.line(player.steps))
        return news

    def _due(self, player: Player, line: Line) -> News:
        """Return what the line names if its step has come."""
        if player.steps < line.step:
            if not player.runs:
                raise CannotServe(
                    f"the journal continues before engine step {line.step}, but no turn is generated after "
                    f"step {player.steps}; {DIFFERS}"
                )
            return News()
        if unknown := sorted(set(line.answers) - set(player.asked)):
            raise CannotServe(
                f"the journal has an answer for episode {unknown[0]} before engine step {line.step}, but its "
                f"environment was not called; {DIFFERS}"
            )
        inbox, joins = self._inbox, line.version is not None and not self._joined
        update = None if joins else line.version
        if joins:
            self._await(line, "offer", lambda: inbox.offer is not None)
        if line.hold or update is not None:
            self._await(line, "announcement of an update", lambda: inbox.announced is not None)
        if update is not None:
            self._send(Ready(update))
            self._await(line, f"version {update}", lambda: inbox.go == update)
            inbox.announced = inbox.go = None
        self._await(line, f"episodes {line.assigned}", lambda: {*line.assigned} <= {*inbox.assigned})
        self._await(line, f"answers for {line.answers}", lambda: {*line.answers} <= {*inbox.answers})
        if inbox.end is not None:
            return News()
        self._line, self._joined = next(self._lines, None), True
        return News(
            join=inbox.take_offer() if joins else None,
            hold=line.hold,
            update=update,
            assigned=inbox.take_assigned(line.assigned),
            answers=inbox.take_answers(line.answers),
        )

    def _await(self, line: Line, what: str, has_arrived: Callable[[], bool]) -> None:
        """Wait until it has arrived, or the replica must end."""
        began = time.monotonic()
        while not has_arrived() and self._inbox.end is None:
            if time.monotonic() - began > self._patience:
                raise CannotServe(
                    f"the journal has {what} before engine step {line.step}, but nothing came for "
                    f"{self._patience:g} s; {DIFFERS}"
                )
            self._inbox.look(BEAT)

    def _after(self, player: Player) -> News:
        """After the last line: complete the turns that are generated, then wait for the end of the run."""
        if player.runs:
            return News()
        now, inbox = time.monotonic(), self._inbox
        self._idle_since = self._idle_since or now
        left = sorted({*player.playing, *inbox.assigned})
        if left and now - self._idle_since > self._patience:
            raise CannotServe(
                f"the journal ends after engine step {player.steps} while {len(left)} episodes are left, "
                f"such as {left[0]}; {DIFFERS}"
            )
        inbox.look(BEAT)
        return News()
