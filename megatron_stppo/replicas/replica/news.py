"""What the first rank of a replica broadcasts between two engine steps, and where it comes from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from megatron_stppo.replicas.wire.journal import Line
from megatron_stppo.replicas.wire.messages import Assignment, FromReplica, Offer
from megatron_stppo.rollout.environment_host import Answer
from megatron_stppo.rollout.play import Player

Send = Callable[[FromReplica], object]


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


class NewsSource(Protocol):
    """Decides, on the first rank, in which engine step everything is applied."""

    def next(self, player: Player) -> News:
        """Return what to apply before the next engine step. While the engine is idle, wait for it, but return
        News() after a short time."""
