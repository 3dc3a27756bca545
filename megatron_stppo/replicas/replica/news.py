"""What the first rank of a replica receives, and what it broadcasts between two engine steps.

A NewsSource receives messages of the trainer and answers of environments. They are applied before the next
engine step.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from megatron_stppo.replicas.wire.ends import Dialer
from megatron_stppo.replicas.wire.episodes import Unfinished
from megatron_stppo.replicas.wire.measure import Activity
from megatron_stppo.replicas.wire.messages import (
    Alive,
    Announce,
    Assignment,
    FromReplica,
    FromTrainer,
    Give,
    Play,
    Ready,
    Receive,
    Stop,
    TellUnfinished,
    ToldUnfinished,
)
from megatron_stppo.rollout.episodes.environment_host import Answer, EnvironmentHost
from megatron_stppo.rollout.episodes.play import Player

BEAT = 0.5  # seconds that the ranks of an idle replica wait at most for each other's sign of life


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

    Example: News(assigned=(assignment,)) begins an episode.
    """

    end: End | None = None
    give: Give | None = None  # send weights to another replica
    hold: bool = False  # start no new turns until the next update
    receive: Receive | None = None  # receive weights
    assigned: tuple[Assignment, ...] = ()  # episodes to begin
    answers: tuple[Answer, ...] = ()  # of environments
    waits: bool = False  # more is to be applied before the next engine step


@dataclass(kw_only=True)
class NewsSource:
    """What has arrived at the first rank and is not applied yet; see the module.

    The host must call `dialer.wake` for every answer, so that `look` returns.
    """

    dialer: Dialer
    host: EnvironmentHost
    activity: Activity
    timeout: float  # seconds without a sign of life after which the trainer is lost
    records: bool  # whether another engine can continue episodes in progress
    drain: bool  # turns that run when an update is announced are completed before it
    awaits_answers: bool  # of all environments before the next engine step (rollout.overlap_tools=false)
    asked_to_leave: Callable[[], str]  # returns the name of the signal that this process has got, or ""
    assigned: dict[int, Assignment] = field(default_factory=dict, init=False)  # by number, as they arrived
    answers: dict[int, Answer] = field(default_factory=dict, init=False)  # by number of the episode
    announced: int | None = field(default=None, init=False)  # the version of the newest Announce
    to_give: Give | None = field(default=None, init=False)
    to_receive: Receive | None = field(default=None, init=False)
    to_tell: TellUnfinished | None = field(default=None, init=False)
    end: End | None = field(default=None, init=False)
    version: int = field(default=-1, init=False)  # of the weights; -1: the engine must not run
    _told: int = field(default=-1, init=False)  # the version of the newest Ready
    _held: bool = field(default=False, init=False)  # turns, for the announced update
    _player: Player | None = field(default=None, init=False)

    def next(self, player: Player) -> News:
        """Return what to apply before the next engine step. While the engine is idle, wait for it, but return
        News() after a short time. Raises as `look` does.
        """
        self._player = player
        self.look(0.0)
        if not (player.runs and self.version >= 0) and not self._has_news(player):
            self.look(BEAT)
        while self._awaits(player) and not self._is_asked(player):
            self.look(BEAT)
        return News(end=self.end) if self.end is not None else self._news(player)

    def look(self, timeout: float) -> None:
        """Wait up to `timeout` seconds until something arrives, and receive all that has arrived. Answer a
        TellUnfinished with what the player's episodes have played.

        Raises RolloutError and ToolsStayAway as EnvironmentHost.check does, and msgspec.MsgspecError as
        Dialer.take does.
        """
        messages = self.dialer.take(timeout)
        for message in messages:
            self._receive(message)
        self.answers |= {answer.index: answer for answer in self.host.take(0)}
        self.host.check()
        self.end = self.end or self._reason_to_end(bool(messages))
        if self.to_tell is not None:
            self.tell_unfinished()
            self.send(ToldUnfinished(self.to_tell.number))
            self.to_tell = None

    def tell_unfinished(self) -> None:
        """Send what the episodes in progress have played, except those of an evaluation."""
        if self._player is None or not self.records:
            return
        for number in self._player.playing:
            if number >= 0 and (record := self._player.record(number)):
                self.dialer.send(Unfinished.of(number, record))

    def send(self, message: FromReplica) -> None:
        """Send the newest counters, and then the message: an iteration that ends with it has both."""
        self.dialer.send(Alive(self.activity.counters))
        self.dialer.send(message)

    def _news(self, player: Player) -> News:
        """Return what has arrived. It is no longer kept.

        While environments must answer first, these are only transfers.
        """
        hold, receive = self._prepare_update(player)
        give, self.to_give = self.to_give, None
        if receive is not None:
            self.announced = self.to_receive = None
        if self._awaits(player):
            return News(give=give, hold=hold, receive=receive, waits=True)
        begun = [n for n, episode in self.assigned.items() if episode.version <= self.version]
        answered = [number for number in player.asked if number in self.answers]
        return News(
            give=give,
            hold=hold,
            receive=receive,
            assigned=tuple(map(self.assigned.pop, begun)),
            answers=tuple(map(self.answers.pop, answered)),
        )

    def _receive(self, message: FromTrainer) -> None:
        match message:
            case Play():
                self.assigned |= {episode.number: episode for episode in message.episodes}
            case Announce():
                self.announced = message.version
            case Receive():
                self.to_receive = message
            case Give():
                self.to_give = message
            case TellUnfinished():
                self.to_tell = message
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

    def _awaits(self, player: Player) -> bool:
        """Whether the next engine step must wait for environments."""
        return self.awaits_answers and not set(player.asked) <= self.answers.keys()

    def _is_asked(self, player: Player) -> bool:
        """Whether the trainer waits for something that needs no engine step."""
        completes = self.drain and self._held and player.runs and self.version >= 0
        is_due = self.announced is not None and self.announced != self._told and not completes
        return bool(self.end or self.to_give or self.to_receive or is_due)

    def _has_news(self, player: Player) -> bool:
        begins = any(episode.version <= self.version for episode in self.assigned.values())
        return bool(self._is_asked(player) or begins or self.answers)

    def _prepare_update(self, player: Player) -> tuple[bool, Receive | None]:
        """Answer an announcement when the update can be entered. Return (hold, receive) of the News."""
        drains = self.drain and self.version >= 0
        if self.announced is not None:
            if drains and not self._held:
                self._held = True
                return True, None
            if self.announced != self._told and not (drains and player.runs):
                self._told = self.announced
                self.send(Ready(self._told))
        if self.to_receive is not None:
            self._held = False
        return False, self.to_receive
