"""What an episode in progress has played, so that another engine can continue it, also after a restart.

The episode begins anew: its environment is reset with the same seed, and its tools are called again. But
where the policy would read the same tokens as before, its turn is not generated again: it is the recorded
one, with its log-probs and versions. A turn that was not complete is continued after its last token. Where
the policy reads something else, because a tool or an agent answered differently, turns are generated as
usual. So no token follows a context in which it was not generated.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_stppo.rollout.vllm.generation import RecordedTurn


@dataclass(frozen=True)
class RecordedHistory:
    """The turns of one conversation. Example: RecordedHistory((1, 2), (turn,)) read (1, 2) first."""

    prompt_ids: tuple[int, ...]
    turns: tuple[RecordedTurn, ...]


Record = tuple[RecordedHistory, ...]


class Recall:
    """The turns of a record, by the tokens that the policy read before them.

    Example: with record = (RecordedHistory((1, 2), (turn,)),), Recall(record).next((1, 2), 100) is `turn`,
    and a second call returns None.
    """

    def __init__(self, record: Record) -> None:
        self.record = record
        self._turns: dict[tuple[int, ...], deque[RecordedTurn]] = defaultdict(deque)
        for history in record:
            context = history.prompt_ids
            for turn in history.turns:
                self._turns[context].append(turn)
                context += turn.token_ids + turn.observation_ids

    def __bool__(self) -> bool:
        """Whether turns are left."""
        return any(self._turns.values())

    def has_only(self, version: int) -> bool:
        """Return whether all recorded tokens are of this version."""
        turns = (turn for history in self.record for turn in history.turns)
        return all(known == version for turn in turns for known, _ in turn.versions)

    def next(self, context: Sequence[int], most: int) -> RecordedTurn | None:
        """Return the turn that follows this context, once; None if there is none, or if it has more than
        `most` tokens, or as many and is not complete."""
        turns = self._turns.get(tuple(context))
        if not turns:
            return None
        turn = turns.popleft()
        return turn if len(turn.token_ids) < most + (turn.reason is not None) else None
