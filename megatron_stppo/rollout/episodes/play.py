"""Episodes in progress on one engine, and the steps with which they advance.

All ranks of an engine group have a Player and call the same methods with the same arguments in the same
order. They then run the same engine steps. Environments run on the group's first rank only: between two
engine steps it broadcasts their answers, and every rank advances its own copy of the episodes. The next turn
of an episode enters the engine at once, so tool calls and generation overlap (continuous batching). The
prefix cache keeps the history.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from megatron_stppo.config import ConfigError
from megatron_stppo.rollout.episodes.environment_host import Answer, EnvironmentHost
from megatron_stppo.rollout.episodes.episode import Episode
from megatron_stppo.rollout.vllm.generation import Finished, Recall, Record

if TYPE_CHECKING:
    from megatron_stppo.rollout.vllm.engine import Engine

OneVersion = Literal["turn", "episode", ""]


class Player:
    """Plays episodes on one rank of an engine.

    Example: begin(episodes), then apply(answers) and step() in turn while episodes are in progress. The first
    turn of an episode with seed=1000003 and place=6 has the seed request_seed(1000003, 6, 1).
    """

    def __init__(self, engine: Engine, host: EnvironmentHost | None, one_version: OneVersion = "") -> None:
        """host: runs the environments; on the first rank of the engine's group, elsewhere None. one_version:
        what must not have tokens of several versions, and does not go on from a record of another one."""
        self._engine, self._host, self._one_version = engine, host, one_version
        self.playing: dict[int, Episode] = {}  # the episodes in progress by index; equal on all ranks
        # the episodes whose environment was called and has not answered, in the order of the calls
        self.asked: dict[int, None] = {}
        self._held: list[int] | None = None  # while turns are held: the episodes whose next turn is due
        self._recalls: dict[int, Recall] = {}  # of episodes that continue a record, by index
        self._recalled: list[Finished] = []  # turns that `step` returns without an engine step
        self.tokens = 0  # generated, in complete turns

    @property
    def runs(self) -> bool:
        """Whether turns are generated, or recalled from a record."""
        return self._engine.unfinished > 0 or bool(self._recalled)

    @property
    def holds(self) -> bool:
        """Whether turns are due that `hold` keeps from starting."""
        return bool(self._held)

    def begin(self, episodes: Sequence[Episode]) -> None:
        """Begin episodes, in this order.

        If no episode is in progress, the engine's prefix cache is emptied first, so that the new ones do not
        depend on what was played before.
        """
        if episodes and not self.playing:
            self._engine.refresh()
        for new in episodes:
            assert new.index not in self.playing, f"episode {new.index} is already in progress"
            self.playing[new.index] = new
            recall = Recall(new.earlier)
            if recall and (self._one_version != "episode" or recall.has_only(self._engine.published())):
                self._recalls[new.index] = recall
            self.asked[new.index] = None
            if self._host:
                self._host.reset(new.index, new.task, request_seed(new.seed, new.place, 0))

    def apply(self, answers: Iterable[Answer]) -> list[Episode]:
        """Apply answers of environments: each ends its episode or starts the next turn.

        Return the episodes that ended. Raises ConfigError for an environment that is used wrongly.
        """
        return [ended for answer in answers if (ended := self._advance(answer))]

    def step(self) -> list[Episode]:
        """Run an engine step if turns are being generated. Return the episodes that ended.

        Raises EngineFailure.
        """
        recalled, self._recalled = self._recalled, []
        ended = self.hand_over(recalled)
        self.tokens -= sum(len(turn.token_ids) for turn in recalled)
        if self._engine.unfinished:
            ended += self.hand_over(self._engine.step())
        return ended

    def record(self, index: int) -> Record:
        """Return what the episode has played so far; of an episode that repeats its record, the record."""
        if recall := self._recalls.get(index):
            return recall.record
        return self.playing[index].record(self._engine.recorded(str(index)))

    def hand_over(self, turns: Iterable[Finished]) -> list[Episode]:
        """Pass complete turns to their environments. Return the episodes that ended with their turn."""
        return [ended for finished in turns if (ended := self._pass_on(finished))]

    def hold(self) -> None:
        """Start no new turns until `release`. Turns that are being generated continue."""
        if self._held is None:
            self._held = []

    def release(self) -> None:
        """Start the turns that were held, in the order in which they were due."""
        held, self._held = self._held or [], None
        for index in held:
            self._generate(index)

    def _advance(self, answer: Answer) -> Episode | None:
        """Apply an answer. Return the episode if it has ended."""
        del self.asked[answer.index]
        if answer.misuse:
            raise ConfigError(answer.misuse)
        episode = self.playing[answer.index]
        if answer.result is not None:
            episode.answer(answer.result)
        elif answer.request is not None:
            episode.ask(answer.request)
        else:
            episode.start(answer.messages, answer.stop_strings)
        if episode.outcome is not None:
            return self._end(answer.index)
        if self._held is None:
            self._generate(answer.index)
        else:
            self._held.append(answer.index)
        return None

    def _pass_on(self, finished: Finished) -> Episode | None:
        """Pass a turn to its environment, unless it ended the episode. Return the episode if it has ended."""
        index = int(finished.request_id)
        episode = self.playing[index]
        episode.add_turn(finished)
        self.tokens += len(finished.token_ids)
        if episode.outcome is not None:
            return self._end(index)
        self.asked[index] = None
        if self._host:
            self._host.step(index, episode.completion(finished))
        return None

    def _end(self, index: int) -> Episode:
        if self._host:
            self._host.close(index)
        self._recalls.pop(index, None)
        return self.playing.pop(index)

    def _generate(self, index: int) -> None:
        episode, begun = self.playing[index], None
        if index in self._recalls:
            begun = self._recalls[index].next(episode.context, episode.max_tokens)
            if begun is not None and begun.reason is not None:
                return self._recalled.append(begun.finished(str(index)))
            del self._recalls[index]  # from here on the episode has a record of its own
            version = self._engine.published()
            if (
                begun is not None
                and self._one_version
                and begun.versions != ((version, len(begun.token_ids)),)
            ):
                begun = None
        # numbers of its own for the rest of a turn: those of its first tokens have been used
        turn = episode.played + 1 + (len(begun.token_ids) << 32 if begun is not None else 0)
        self._engine.add(
            str(index),
            episode.context,
            seed=request_seed(episode.seed, episode.place, turn),
            max_tokens=episode.max_tokens,
            temperature=episode.temperature,
            top_p=episode.top_p,
            stop_strings=episode.stop_strings,
            begun=begun,
        )


def request_seed(seed: int, place: int, turn: int) -> int:
    """Return a seed of 63 bits that depends on all three numbers.

    It is the same in every process; the values of Python's `hash` are not.
    """
    digest = hashlib.blake2b(f"{seed}/{place}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
