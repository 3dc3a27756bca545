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
from megatron_stppo.replicas.replica.activity import Activity
from megatron_stppo.replicas.replica.news import End, News, NewsSource
from megatron_stppo.replicas.wire.messages import Assignment, Done, Offer, ReplicaEnds
from megatron_stppo.rollout.episodes.episode import Episode, Limits
from megatron_stppo.rollout.episodes.play import InProgress, Player

if TYPE_CHECKING:
    from megatron_stppo.replicas.wire.weights import Link
    from megatron_stppo.rollout.vllm.engine import Engine

log = logging.getLogger(__name__)
RENEW = 5.0  # seconds after which the deadline of the phase `rollout` starts again


class Replica:
    """One rank of a replica.

    link: makes the link to the trainer of an Offer. phase: the phases of a Watchdog, by name.
    first: None on the other ranks.
    """

    def __init__(
        self,
        engine: Engine,
        limits: Limits,
        link: Callable[[Offer], Link],
        phase: Callable[[str], AbstractContextManager[None]],
        first: NewsSource | None,
    ) -> None:
        self._engine, self._limits, self._phase, self._first = engine, limits, phase, first
        self._make_link = link
        self._link: Link | None = None
        self._activity = first.activity if first else Activity()
        self._player = Player(engine, first.host if first else None)

    def run(self) -> End:
        """Play until the replica ends, and return why. Collective.

        The reason is also sent to the trainer, unless the trainer decided it or is gone.
        Raises ConfigError for an environment that is used wrongly, EngineFailure, and CannotServe if weights
        do not arrive. These are sent too.
        """
        try:
            end = self._play()
        except Exception as error:
            self._tell("misuse" if isinstance(error, ConfigError) else "error", _said(error))
            raise
        match end.kind:
            case "left" | "away" | "error":
                self._tell(end.kind, end.text)
        return end

    def close(self) -> None:
        if self._link is not None:
            self._link.close()

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
        if news.join is not None:
            self._join(news.join)
        if news.hold:
            player.hold()
        if news.update is not None:
            self._update(news.update)
        player.begin([self._begun(assignment) for assignment in news.assigned])
        self._report(player.apply(news.answers))
        self._step()
        return None

    def _hear(self) -> News:
        """Return the first rank's news on all ranks."""
        news: News | None = None
        if self._first:
            began = time.monotonic()
            news = _next(self._first, self._player)
            self._activity.waited(began, time.monotonic())
        return broadcast_record(news, News, 0, self._engine.group)

    def _step(self) -> None:
        if self._player.runs:
            began = time.monotonic()
            ended = self._player.step()
            self._activity.stepped(began, time.monotonic())
            self._report(ended)

    def _join(self, offer: Offer) -> None:
        with self._phase("reshard"), _failing(f"the link to the trainer at {offer.host}:{offer.port}"):
            self._link = self._make_link(offer)
            self._link.sync(offer.version)
        self._engine.refresh()
        self._activity.joined(time.monotonic())

    def _update(self, version: int) -> None:
        """Receive new weights between two steps. Turns that were begun continue with them."""
        assert self._link is not None, "the first news are those of joining"
        player, began = self._player, time.monotonic()
        self._report(player.hand_over(self._engine.settle()))
        interrupts, recomputed = player.runs or player.holds, self._engine.computed_tokens
        with self._phase("reshard"), _failing(f"the weights of version {version}"):
            self._link.sync(version)
        self._engine.refresh(recompute=True)
        player.release()
        self._activity.updated(began, time.monotonic(), recomputed, interrupts)
        if self._first:
            self._first.host.renew_patience()

    def _begun(self, assignment: Assignment) -> InProgress:
        a, engine = assignment, self._engine
        episode = Episode(a.task, a.group, self._limits, engine.tokenizer, engine.end_ids)
        return InProgress(a.number, episode, a.seed, a.place, a.temperature, a.top_p)

    def _report(self, ended: Sequence[InProgress]) -> None:
        """Send the trajectories of episodes that have ended."""
        self._activity.played(self._player.tokens, len(ended))
        if self._first:
            for playing in ended:
                self._first.send(Done(playing.index, playing.episode.trajectory()))


def _next(source: NewsSource, player: Player) -> News:
    """Return the source's news. If it fails, they end the replica, because the other ranks wait for them."""
    try:
        return source.next(player)
    except ToolsStayAway as error:
        return News(end=End("away", str(error)))
    except Exception as error:
        if not isinstance(error, CannotServe):
            log.error("the first rank failed", exc_info=True)
        return News(end=End("error", _said(error)))


@contextmanager
def _failing(what: str) -> Iterator[None]:
    """Turn an error of the block into CannotServe: without verified weights the replica must not serve."""
    try:
        yield
    except Exception as error:
        log.error("%s did not arrive", what, exc_info=True)
        raise CannotServe(f"{what} did not arrive: {_said(error)}") from error


def _said(error: Exception) -> str:
    """Return the error in one line, with its type unless it is one of ours."""
    return one_line(str(error) if isinstance(error, Ending) else f"{type(error).__name__}: {error}")


def raise_failure(end: End) -> None:
    """Raise the error with which the process ends; nothing if it was asked to end."""
    if end.kind == "refused":
        raise ConfigError(end.text)
    if end.kind not in ("stop", "left"):
        raise CannotServe(end.text)
