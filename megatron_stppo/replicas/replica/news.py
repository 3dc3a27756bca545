"""What the first rank of a replica broadcasts between two engine steps, and in which step it is applied."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron_stppo.base.errors import CannotServe
from megatron_stppo.replicas.replica.inbox import End, Inbox, Send
from megatron_stppo.replicas.wire.journal import Journal, Line
from megatron_stppo.replicas.wire.messages import Assignment, Offer, Ready
from megatron_stppo.rollout.episodes.environment_host import Answer
from megatron_stppo.rollout.episodes.play import Player

BEAT = 0.5  # seconds that the ranks of an idle replica wait at most for each other's sign of life
DIFFERS = "this run differs from the recorded one"


@dataclass(frozen=True)
class News:
    """What changes between two engine steps. Every rank applies the fields in this order.

    Example: News(assigned=(assignment,)) begins an episode, News(update=4) receives version 4.
    """

    end: End | None = None
    join: Offer | None = None  # build the group for weights, and receive the offered version
    hold: bool = False  # start no new turns until the next update
    update: int | None = None  # receive this version
    assigned: tuple[Assignment, ...] = ()  # episodes to begin
    answers: tuple[Answer, ...] = ()  # of environments

    def line(self, step: int) -> Line:
        """Return the line of the journal for what is applied before engine step `step`."""
        return Line(
            step,
            tuple(assignment.number for assignment in self.assigned),
            tuple(answer.index for answer in self.answers),
            self.join.version if self.join is not None else self.update,
            self.hold,
        )


class NewsSource:
    """Decides, on the first rank, in which engine step everything is applied, and records it."""

    def __init__(self, inbox: Inbox, send: Send, journal: Journal) -> None:
        self._inbox, self._send, self._journal = inbox, send, journal

    def next(self, player: Player) -> News:
        """Return what to apply before the next engine step. While the engine is idle, wait for it, but return
        News() after a short time.

        Raises CannotServe if a repeated run differs from the recorded one.
        """
        self._inbox.look(0.0)
        news = self._next(player)
        if self._inbox.end is not None:
            return News(end=self._inbox.end)
        self._journal.write(news.line(player.steps))
        return news

    def _next(self, player: Player) -> News:
        raise NotImplementedError


class Live(NewsSource):
    """Everything is applied as soon as it has arrived."""

    def __init__(
        self, inbox: Inbox, send: Send, journal: Journal, *, drain: bool, awaits_answers: bool
    ) -> None:
        """drain: turns that run when an update is announced are completed before it.

        awaits_answers: wait for all environments before the next engine step (rollout.overlap_tools=false).
        """
        super().__init__(inbox, send, journal)
        self._drain, self._awaits_answers = drain, awaits_answers
        self._held = self._is_ready = False  # for the announced update

    def _next(self, player: Player) -> News:
        inbox = self._inbox
        if not player.runs and not self._has_news():
            inbox.look(BEAT)
        while self._awaits_answers and inbox.end is None and not set(player.asked) <= set(inbox.answers):
            inbox.look(BEAT)
        if inbox.end is not None:
            return News()
        if inbox.offer is not None:
            return News(join=inbox.take_offer())
        hold, update = self._prepare_update(player)
        return News(
            hold=hold,
            update=update,
            assigned=inbox.take_assigned(list(inbox.assigned)),
            answers=inbox.take_answers([number for number in player.asked if number in inbox.answers]),
        )

    def _has_news(self) -> bool:
        inbox = self._inbox
        due = inbox.announced is not None and (not self._is_ready or inbox.go == inbox.announced)
        return bool(inbox.end or inbox.offer or inbox.assigned or inbox.answers or due)

    def _prepare_update(self, player: Player) -> tuple[bool, int | None]:
        """Answer an announcement when the update can be entered. Return (hold, update) of the News."""
        inbox = self._inbox
        if (version := inbox.announced) is None:
            return False, None
        if self._drain and not self._held:
            self._held = True
            return True, None
        if not self._is_ready and not (self._drain and player.runs):
            self._is_ready = True
            self._send(Ready(version))
        if inbox.go != version:
            return False, None
        inbox.announced = inbox.go = None
        self._held = self._is_ready = False
        return False, version


class Replayed(NewsSource):
    """Repeats a recorded run: everything is applied before the engine step that a line of its journal names.

    Messages and answers arrive at other times than in the recorded run. Each is kept until its step, and the
    engine waits for those that are due. The replica then makes the same engine steps with the same requests.
    """

    def __init__(
        self, inbox: Inbox, send: Send, journal: Journal, lines: Iterator[Line], patience: float
    ) -> None:
        """patience: seconds to wait for what is due."""
        super().__init__(inbox, send, journal)
        self._lines, self._patience = lines, patience
        self._line = next(lines, None)
        self._joined = False
        self._idle_since: float | None = None  # after the last line

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
