"""What has arrived at a replica's first rank and is not applied yet: messages and answers of environments."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from megatron_stppo.replicas.replica.parent import has_ended
from megatron_stppo.replicas.wire.dialer import Dialer
from megatron_stppo.replicas.wire.messages import (
    Announce,
    Assignment,
    FromReplica,
    FromTrainer,
    Go,
    NotAccepted,
    Offer,
    Play,
    Stop,
)
from megatron_stppo.rollout.episodes.environment_host import Answer, EnvironmentHost

Send = Callable[[FromReplica], object]


@dataclass(frozen=True)
class End:
    """Why the replica ends. Example: End("stop", "the run has ended").

    stop: the trainer has asked for it. left: a signal has. refused: the trainer does not accept the replica.
    lost: the trainer is gone. away: tools stay unreachable. error: any other failure.
    """

    kind: Literal["stop", "left", "refused", "lost", "away", "error"]
    text: str  # one line


class Inbox:
    """Receives from the trainer and from the environments.

    The host must call `dialer.wake` for every answer, so that `look` returns.
    """

    def __init__(
        self,
        dialer: Dialer,
        host: EnvironmentHost,
        timeout: float,
        asked_to_leave: Callable[[], str],
        parent: int | None = None,
    ) -> None:
        """timeout: seconds without a sign of life after which the trainer is lost.

        asked_to_leave: returns the name of the signal that this process has got, or "". parent: the process
        id of the trainer, if it has started this process.
        """
        self._dialer, self._host, self._timeout = dialer, host, timeout
        self._asked_to_leave, self._parent = asked_to_leave, parent
        self._assigned: dict[int, Assignment] = {}
        self._answers: dict[int, Answer] = {}
        self.offer: Offer | None = None
        self.announced: int | None = None  # the version of the newest Announce
        self.go: int | None = None  # the version of the newest Go
        self.end: End | None = None

    @property
    def assigned(self) -> Collection[int]:
        """The numbers of the episodes to begin, in order of arrival."""
        return self._assigned

    @property
    def answers(self) -> Collection[int]:
        """The numbers of the episodes whose environments have answered."""
        return self._answers

    def look(self, timeout: float) -> None:
        """Wait up to `timeout` seconds until something arrives, and receive all that has arrived.

        Raises RolloutError and ToolsStayAway as EnvironmentHost.check does, and msgspec.MsgspecError as
        Dialer.take does.
        """
        messages = self._dialer.take(timeout)
        for message in messages:
            self._receive(message)
        self._answers |= {answer.index: answer for answer in self._host.take(0)}
        self._host.check()
        if self.end is None:
            self.end = self._reason_to_end(bool(messages))

    def take_assigned(self, numbers: Iterable[int]) -> tuple[Assignment, ...]:
        return tuple(self._assigned.pop(number) for number in numbers)

    def take_answers(self, numbers: Iterable[int]) -> tuple[Answer, ...]:
        return tuple(self._answers.pop(number) for number in numbers)

    def take_offer(self) -> Offer | None:
        offer, self.offer = self.offer, None
        return offer

    def _receive(self, message: FromTrainer) -> None:
        match message:
            case Play():
                self._assigned |= {episode.number: episode for episode in message.episodes}
            case Announce():
                self.announced = message.version
            case Go():
                self.go = message.version
            case Offer():
                self.offer = message
            case Stop():
                self.end = End("stop", message.reason)
            case NotAccepted():
                self.end = End("refused", message.why)

    def _reason_to_end(self, hears: bool) -> End | None:
        if name := self._asked_to_leave():
            return End("left", name)
        if self._dialer.ended and not hears:
            return End("lost", self._dialer.ended)
        if (silence := self._dialer.silence) > self._timeout and not hears:
            return End(
                "lost", f"the trainer has been silent for {silence:.0f} s (serving.timeout={self._timeout:g})"
            )
        if has_ended(self._parent):
            return End("lost", f"the trainer, process {self._parent}, has ended")
        return None
