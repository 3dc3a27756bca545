"""What the first rank of a replica receives, and what it broadcasts between two engine steps.

A NewsSource receives messages of the trainer and answers of environments, and decides before which engine
step they are applied.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from megatron_stppo.base.errors import CannotServe
from megatron_stppo.replicas.replica.activity import Activity
from megatron_stppo.replicas.wire.dialer import Dialer
from megatron_stppo.replicas.wire.journal import Journal, Line
from megatron_stppo.replicas.wire.messages import (
    Alive,
    Announce,
    Assignment,
    FromReplica,
    FromTrainer,
    Go,
    Offer,
    Play,
    Ready,
    Stop,
)
from megatron_stppo.rollout.episodes.environment_host import Answer, EnvironmentHost
from megatron_stppo.rollout.episodes.play import Player

BEAT = 0.5  # seconds that the ranks of an idle replica wait at most for each other's sign of life
DIFFERS = "this run differs from the recorded one"


@dataclass(frozen=True)
class End:
    """Why the replica ends. Example: End("stop", "the run has ended").

    stop: the trainer has asked for it. left: a signal has. refused: the trainer does not accept the replica.
    lost: the trainer is gone. away: tools stay unreachable. error: any other failure.
    """

    kind: Literal["stop", "left", "refused", "lost", "away", "error"]
    text: str  # one line


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


@dataclass(kw_only=True)
class NewsSource:
    """What has arrived at the first rank and is not applied yet; see the module.

    The host must call `dialer.wake` for every answer, so that `look` returns.
    """

    dialer: Dialer
    host: EnvironmentHost
    activity: Activity
    journal: Journal
    timeout: float  # seconds without a sign of life after which the trainer is lost
    asked_to_leave: Callable[[], str]  # returns the name of the signal that this process has got, or ""
    assigned: dict[int, Assignment] = field(default_factory=dict, init=False)  # by number, as they arrived
    answers: dict[int, Answer] = field(default_factory=dict, init=False)  # by number of the episode
    offer: Offer | None = field(default=None, init=False)
    announced: int | None = field(default=None, init=False)  # the version of the newest Announce
    go: int | None = field(default=None, init=False)  # the version of the newest Go
    end: End | None = field(default=None, init=False)

    def next(self, player: Player) -> News:
        """Return what to apply before the next engine step, and record it. While the engine is idle, wait for
        it, but return News() after a short time.

        Raises CannotServe if a repeated run differs from the recorded one, and exceptions of `look`.
        """
        self.look(0.0)
        news = self._next(player)
        if self.end is not None:
            return News(end=self.end)
        self.journal.write(news.line(player.steps))
        return news

    def look(self, timeout: float) -> None:
        """Wait up to `timeout` seconds until something arrives, and receive all that has arrived.

        Raises RolloutError and ToolsStayAway as EnvironmentHost.check does, and msgspec.MsgspecError as
        Dialer.take does.
        """
        messages = self.dialer.take(timeout)
        for message in messages:
            self._receive(message)
        self.answers |= {answer.index: answer for answer in self.host.take(0)}
        self.host.check()
        if self.end is None:
            self.end = self._reason_to_end(bool(messages))

    def send(self, message: FromReplica) -> None:
        """Send the newest counters, and then the message: an iteration that ends with it has both."""
        self.dialer.send(Alive(self.activity.counters))
        self.dialer.send(message)

    def _next(self, player: Player) -> News:
        raise NotImplementedError

    def _news(
        self,
        assigned: Iterable[int] = (),
        answers: Iterable[int] = (),
        hold: bool = False,
        update: int | None = None,
        join: Offer | None = None,
    ) -> News:
        """Return what is applied now. It is no longer kept. assigned, answers: numbers of episodes."""
        if join is not None:
            self.offer = None
        if update is not None:
            self.announced = self.go = None
        return News(
            join=join,
            hold=hold,
            update=update,
            assigned=tuple(self.assigned.pop(number) for number in assigned),
            answers=tuple(self.answers.pop(number) for number in answers),
        )

    def _receive(self, message: FromTrainer) -> None:
        match message:
            case Play():
                self.assigned |= {episode.number: episode for episode in message.episodes}
            case Announce():
                self.announced = message.version
            case Go():
                self.go = message.version
            case Offer():
                self.offer = message
            case Stop():
                self.end = End("refused" if message.is_refusal else "stop", message.reason)

    def _reason_to_end(self, hears: bool) -> End | None:
        if name := self.asked_to_leave():
            return End("left", name)
        if self.dialer.ended and not hears:
            return End("lost", self.dialer.ended)
        if (silence := self.dialer.silence) > self.timeout and not hears:
            return End(
                "lost", f"the trainer has been silent for {silence:.0f} s (serving.timeout={self.timeout:g})"
            )
        return None


@dataclass(kw_only=True)
class Live(NewsSource):
    """Everything is applied as soon as it has arrived."""

    drain: bool  # turns that run when an update is announced are completed before it
    awaits_answers: bool  # of all environments before the next engine step (rollout.overlap_tools=false)
    _held: bool = field(default=False, init=False)  # for the announced update
    _is_ready: bool = field(default=False, init=False)  # for the announced update

    def _next(self, player: Player) -> News:
        if not player.runs and not self._has_news():
            self.look(BEAT)
        while self.awaits_answers and self.end is None and not set(player.asked) <= self.answers.keys():
            self.look(BEAT)
        if self.end is not None:
            return News()
        if self.offer is not None:
            return self._news(join=self.offer)
        hold, update = self._prepare_update(player)
        answered = [number for number in player.asked if number in self.answers]
        return self._news(list(self.assigned), answered, hold, update)

    def _has_news(self) -> bool:
        due = self.announced is not None and (not self._is_ready or self.go == self.announced)
        return bool(self.end or self.offer or self.assigned or self.answers or due)

    def _prepare_update(self, player: Player) -> tuple[bool, int | None]:
        """Answer an announcement when the update can be entered. Return (hold, update) of the News."""
        if (version := self.announced) is None:
            return False, None
        if self.drain and not self._held:
            self._held = True
            return True, None
        if not self._is_ready and not (self.drain and player.runs):
            self._is_ready = True
            self.send(Ready(version))
        if self.go != version:
            return False, None
        self._held = self._is_ready = False
        return False, version


@dataclass(kw_only=True)
class Replayed(NewsSource):
    """Repeats a recorded run: everything is applied before the engine step that a line of its journal names.

    Messages and answers arrive at other times than in the recorded run. Each is kept until its step, and the
    engine waits for those that are due. The replica then makes the same engine steps with the same requests.
    """

    lines: Iterator[Line]
    patience: float  # seconds to wait for what is due
    _joined: bool = field(default=False, init=False)

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
            return News()
        joins = line.version is not None and not self._joined
        update = None if joins else line.version
        if joins:
            self._await(line, "offer", lambda: self.offer is not None)
        if line.hold or update is not None:
            self._await(line, "announcement of an update", lambda: self.announced is not None)
        if update is not None:
            self.send(Ready(update))
            self._await(line, f"version {update}", lambda: self.go == update)
        self._await(line, f"episodes {line.assigned}", lambda: {*line.assigned} <= self.assigned.keys())
        self._await(line, f"answers for {line.answers}", lambda: {*line.answers} <= self.answers.keys())
        if self.end is not None:
            return News()
        self._line, self._joined = next(self.lines, None), True
        join = self.offer if joins else None
        return self._news(line.assigned, line.answers, line.hold, update, join)

    def _await(self, line: Line, what: str, has_arrived: Callable[[], bool]) -> None:
        self._wait(f"the journal has {what} before engine step {line.step}, but nothing came", has_arrived)

    def _wait(self, why: str, is_over: Callable[[], bool]) -> None:
        """Wait until is_over(), or until the replica must end. Raises CannotServe if it takes too long."""
        began = time.monotonic()
        while not is_over() and self.end is None:
            if time.monotonic() - began > self.patience:
                raise CannotServe(f"{why} for {self.patience:g} s; {DIFFERS}")
            self.look(BEAT)

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
        return News()
