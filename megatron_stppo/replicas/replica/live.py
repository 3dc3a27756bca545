"""The news of a replica that plays: everything is applied as soon as it has arrived."""

from __future__ import annotations

from megatron_stppo.replicas.replica.inbox import Inbox
from megatron_stppo.replicas.replica.news import News, Send
from megatron_stppo.replicas.wire.journal import Journal
from megatron_stppo.replicas.wire.messages import Ready
from megatron_stppo.rollout.play import Player

BEAT = 0.5  # seconds that the ranks of an idle replica wait at most for each other's sign of life


class Live:
    """A NewsSource that records what it returns."""

    def __init__(
        self, inbox: Inbox, send: Send, journal: Journal, *, drain: bool, awaits_answers: bool
    ) -> None:
        """drain: turns that run when an update is announced are completed before it.

        awaits_answers: wait for all environments before the next engine step (rollout.overlap_tools=false).
        """
        self._inbox, self._send, self._journal = inbox, send, journal
        self._drain, self._awaits_answers = drain, awaits_answers
        self._held = self._is_ready = False  # for the announced update

    def next(self, player: Player) -> News:
        news = self._next(player)
        self._journal.write(news.line(player.steps))
        return news

    def _next(self, player: Player) -> News:
        inbox = self._inbox
        inbox.look(0.0)
        if not player.runs and not self._has_news():
            inbox.look(BEAT)
        while self._awaits_answers and inbox.end is None and not set(player.asked) <= set(inbox.answers):
            inbox.look(BEAT)
        if inbox.end is not None:
            return News(end=inbox.end)
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
