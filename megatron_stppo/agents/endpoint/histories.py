"""The recorded histories of one episode, and which of them a request continues.

A history is what the policy has read and written in one conversation. It is compared in *units*, which are
what a client can repeat exactly: messages of a chat, characters of a text, or token ids. Its tokens are those
that the engine has read and sampled; they are never encoded again.

A request continues a history if it begins with all its units, and its last completion has units (a text
completion may be empty). If it begins only with those up to an earlier completion (an edited or shortened
conversation, or the same question asked twice), a new history begins, which shares the tokens up to that
completion. Otherwise a new history begins without shared tokens.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Match:
    """How far the units of a request are recorded already.

    Example: Match(1, 3, (5, 9, 7), continues=True): the request begins with the 3 units of history 1, whose
    3 tokens end with a completion; what follows them is new.
    """

    history: int  # the number of the history that the completion is recorded in
    units: int  # how many units of the request have been recorded; the last of them is a completion
    tokens: tuple[int, ...]  # of these units
    continues: bool  # False: the history is a new one


@dataclass
class _Conversation:
    kind: Hashable
    units: Sequence[Hashable]
    tokens: list[int]
    # (units, tokens) up to each completion; None for one without units, which no request can repeat
    ends: list[tuple[int | None, int]] = field(default_factory=list)


class Histories:
    """The recorded histories of one episode; see the module.

    Example, with letters as units: after record(place("", "ab"), "", "ab", "X", new=(1, 2), completion=(7,)),
    place("", "abXc") is Match(0, 3, (1, 2, 7), True), and place("", "ac") is Match(1, 0, (), False).
    """

    def __init__(self) -> None:
        self._recorded: list[_Conversation] = []

    def __len__(self) -> int:
        return len(self._recorded)

    def place(self, kind: Hashable, units: Sequence[Hashable]) -> Match:
        """Return the place of a request.

        kind: what else must be equal, such as the tools of a chat. units: of one type per kind. The longest
        recorded beginning is taken; of equal ones that of a history that can be continued, then the oldest.
        """
        beginnings = [  # (units, continues, -history, tokens)
            (end, position == len(history.ends) - 1, -number, tokens)
            for number, history in enumerate(self._recorded)
            for position, (end, tokens) in enumerate(history.ends)
            if end is not None and history.kind == kind and history.units[:end] == units[:end]
        ]
        if not beginnings:
            return Match(len(self), 0, (), continues=False)
        end, continues, number, tokens = max(beginnings)
        shared = tuple(self._recorded[-number].tokens[:tokens])
        return Match(-number if continues else len(self), end, shared, continues)

    def record(
        self,
        place: Match,
        kind: Hashable,
        units: Any,
        added: Any,
        new: Sequence[int],
        completion: Sequence[int],
    ) -> None:
        """Record a completion at the place of its request, to which nothing was recorded in between.

        units: of the request. added: those with which the client will repeat the completion; none for a text
        completion without text: an equal request then asks for another sample. new: the ids of what was new
        in the request. completion: the sampled ids.
        """
        if not place.continues:
            self._recorded.append(_Conversation(kind, (), list(place.tokens)))
        history = self._recorded[place.history]
        history.units = units + added
        history.tokens += [*new, *completion]
        history.ends.append((len(history.units) if added else None, len(history.tokens)))
