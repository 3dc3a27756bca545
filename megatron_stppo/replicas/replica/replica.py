"""A replica on one of its ranks: plays episodes and receives weights between two engine steps.

All ranks run the same loop. The first rank broadcasts the News, and every rank applies them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Literal

from megatron_stppo.base.errors import CannotServe, Ending, ToolsStayAway
from megatron_stppo.base.printing import one_line
from megatron_stppo.config import ConfigError
from megatron_stppo.parallel.collectives import broadcast_record
from megatron_stppo.replicas.replica.news import End, News, NewsSource
from megatron_stppo.replicas.wire.episodes import Done, unpack_record
from megatron_stppo.replicas.wire.measure import Activity
from megatron_stppo.replicas.wire.messages import Assignment, Give, Moved, Receive, ReplicaEnds, Route
from megatron_stppo.replicas.wire.weights import Link, LinkLost
from megatron_stppo.rollout.episodes.episode import Episode, Limits
from megatron_stppo.rollout.episodes.play import OneVersion, Player
from megatron_stppo.weights.reshard.resharder import ReshardError

if TYPE_CHECKING:
    from megatron_stppo.rollout.vllm.engine import Engine

log = logging.getLogger(__name__)
RENEW = 5.0  # seconds after which the deadline of the phase `rollout` starts again


class Replica:
    """One rank of a replica.

    link: makes the link of a Route; the flag: this replica receives. phase: the phases of a Watchdog, by
    name. first: None on the other ranks. one_version: see Player.
    """

    def __init__(
        self,
        engine: Engine,
        limits: Limits,
        link: Callable[[Route, bool], Link],
        phase: Callable[[str], AbstractContextManager[None]],
        first: NewsSource | None,
        one_version: OneVersion = "",
    ) -> None:
        self._engine, self._limits, self._phase, self._first = engine, limits, phase, first
        self._make_link = link
        self._links: dict[str, Link] = {}  # by route
        self._version, self._why = -1, "no weights have arrived"
        engine.published = self.published
        self._activity = first.activity if first else Activity()
        self._player = Player(engine, first.host if first else None, one_version)

    def run(self) -> End:
        """Play until the replica ends, and return why. Collective.

        The reason is also sent to the trainer, unless the trainer decided it or is gone.
        Raises ConfigError for an environment that is used wrongly, EngineFailure, and CannotServe if a rank
        cannot receive or send weights. These are sent too.
        """
        try:
            end = self._play()
        except Exception as error:
            self._tell("misuse" if isinstance(error, ConfigError) else "error", _said(error))
            raise
        if end.kind == "left" or end.kind == "away" or end.kind == "error":
            if self._first:
                self._first.tell_unfinished()
            self._tell(end.kind, end.text)
        return end

    def published(self) -> int:
        """Return the version of the weights. Raises ReshardError unless all of them have arrived."""
        if self._version < 0:
            raise ReshardError(f"this replica has no complete weights: {self._why}")
        return self._version

    def close(self) -> None:
        """Leave all links. The engine cannot generate any more."""
        self._version, self._why = -1, "the links are closed"
        for link in self._links.values():
            link.close()

    def _tell(self, kind: Literal["left", "misuse", "away", "error"], text: str) -> None:
        if self._first:
            self._first.send(ReplicaEnds(kind, text))

    def _play(self) -> End:
        while True:
            with self._phase("rollout"):
                renew = time.monotonic() + RENEW
                while time.monotonic() < renew:
                    if (end := self._turn()) is not None:
                        return end

    def _turn(self) -> End | None:
        """Apply the news and run an engine step. Return why the replica ends, if it does."""
        player, news = self._player, self._hear()
        if news.end is not None:
            return news.end
        if news.give is not None:
            began = time.monotonic()
            self._move(news.give, receives=False)
            self._activity.gave(began, time.monotonic())
        if news.hold:
            player.hold()
        if news.receive is not None:
            self._receive(news.receive)
        player.begin([self._begun(assignment) for assignment in news.assigned])
        self._report(player.apply(news.answers))
        if not news.waits:
            self._step()
        return None

    def _hear(self) -> News:
        """Return the first rank's news on all ranks. If they fail, they end the replica: the others wait."""
        news: News | None = None
        if self._first:
            began = time.monotonic()
            try:
                news = self._first.next(self._player)
            except ToolsStayAway as error:
                news = News(end=End("away", str(error)))
            except Exception as error:
                if not isinstance(error, CannotServe):
                    log.error("the first rank failed", exc_info=True)
                news = News(end=End("error", _said(error)))
            self._activity.waited(began, time.monotonic())
        return broadcast_record(news, News, 0, self._engine.group)

    def _step(self) -> None:
        if self._player.runs and self._version >= 0:
            began = time.monotonic()
            ended = self._player.step()
            self._activity.stepped(began, time.monotonic())
            self._report(ended)

    def _receive(self, message: Receive) -> None:
        """Receive weights between two steps. Turns that were begun continue with them.

        If they do not arrive, the engine waits until they are sent again.
        """
        player, began = self._player, time.monotonic()
        if self._version >= 0:  # else the transfer that failed has settled it
            self._report(player.hand_over(self._engine.settle()))
        player.hold()
        interrupts, recomputed = player.runs or player.holds, self._engine.computed_tokens
        self._set_version(-1, f"version {message.version} has not arrived")
        if not self._move(message, receives=True):
            return
        self._set_version(message.version)
        self._engine.refresh(recompute=True)
        player.release()
        self._activity.updated(began, time.monotonic(), recomputed, interrupts)
        if self._first:
            self._first.host.renew_patience()

    def _move(self, message: Receive | Give, receives: bool) -> bool:
        """Receive or send weights, and tell the trainer. Return False if the other end is lost."""
        route, version, failed = message.route, message.version, ""
        try:
            with self._phase("reshard"), _failing(f"the weights of version {version} over {route.name}"):
                if (link := self._links.get(route.name)) is None:
                    self._close_lost()
                    link = self._links[route.name] = self._make_link(route, receives)
                link.sync(version)
        except LinkLost as error:
            self._links.pop(route.name, None)
            failed = one_line(str(error))
            log.warning("%s", failed)
        if self._first:
            self._first.send(Moved(route.name, version, failed))
        return not failed

    def _close_lost(self) -> None:
        """Close the links to replicas that are lost."""
        for name, link in list(self._links.items()):
            if link.is_lost():
                self._links.pop(name).close()

    def _set_version(self, version: int, why: str = "") -> None:
        self._version, self._why = version, why
        if self._first:
            self._first.version = version

    def _begun(self, assignment: Assignment) -> Episode:
        a, engine = assignment, self._engine
        played = a.number, a.seed, a.place, a.temperature, a.top_p, unpack_record(a.record)
        return Episode(a.task, a.group, self._limits, engine.tokenizer, engine.end_ids, *played)

    def _report(self, ended: Sequence[Episode]) -> None:
        """Send the trajectories of episodes that have ended."""
        self._activity.played(self._player.tokens, len(ended))
        if self._first:
            for episode in ended:
                self._first.send(Done(episode.index, episode.trajectory()))


@contextmanager
def _failing(what: str) -> Iterator[None]:
    """Turn an error of this replica into CannotServe. A lost link is none."""
    try:
        yield
    except LinkLost:
        raise
    except Exception as error:
        log.error("%s cannot be exchanged", what, exc_info=True)
        raise CannotServe(f"{what} cannot be exchanged: {_said(error)}") from error


def _said(error: Exception) -> str:
    """Return the error in one line, with its type unless it is one of ours."""
    return one_line(str(error) if isinstance(error, Ending) else f"{type(error).__name__}: {error}")


def raise_failure(end: End) -> None:
    """Raise the error with which the process ends; nothing if it was asked to end."""
    if end.kind == "refused":
        raise ConfigError(end.text)
    if end.kind not in ("stop", "left"):
        raise CannotServe(end.text)
