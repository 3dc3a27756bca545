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
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_stppo.config import ConfigError
from megatron_stppo.rollout.episodes.environment_host import Answer, EnvironmentHost
from megatron_stppo.rollout.episodes.episode import Episode
from megatron_stppo.rollout.vllm.generation import Finished

if TYPE_CHECKING:
    from megatron_stppo.rollout.vllm.engine import Engine


@dataclass(frozen=True)
class InProgress:
    """An episode in progress, and how its turns are sampled.

    Example: InProgress(70, episode, 1000003, 6, 1.0, 1.0). Its first turn has the seed
    request_seed(1000003, 6, 1).
    """

    index: int  # unique among the episodes in progress; names its requests and its environment
    episode: Episode
    seed: int  # of the rollout
    place: int  # number of the episode within the rollout
    temperature: float
    top_p: float


class Player:
    """Plays episodes on one rank of an engine.

    Example: begin(episodes), then apply(answers) and step() in turn while episodes are in progress.
    """

    def __init__(self, engine: Engine, host: EnvironmentHost | None) -> None:
        """host: runs the environments; on the first rank of the engine's group, elsewhere None."""
        self._engine, self._host = engine, host
        self.playing: dict[int, InProgress] = {}  # the episodes in progress by index; equal on all ranks
        # the episodes whose environment was called and has not answered, in the order of the calls
        self.asked: dict[int, None] = {}
        self._held: list[int] | None = None  # while turns are held: the episodes whose next turn is due
        self.steps = 0  # engine steps
        self.tokens = 0  # generated, in complete turns

    @property
    def runs(self) -> bool:
        """Whether the engine generates turns."""
        return self._engine.unfinished > 0

    @property
    def holds(self) -> bool:
        """Whether turns are due that `hold` keeps from starting."""
        return bool(self._held)

    def begin(self, episodes: Sequence[InProgress]) -> None:
        """Begin episodes, in this order.

        If no episode is in progress, the engine's prefix cache is emptied first, so that the new ones do not
        depend on what was played before.
        """
        if episodes and not self.playing:
            self._engine.refresh()
        for new in episodes:
            assert new.index not in self.playing, f"episode {new.index} is already in progress"
            self.playing[new.index] = new
            self.asked[new.index] = None
            if self._host:
                self._host.reset(new.index, new.episode.task, request_seed(new.seed, new.place, 0))

    def apply(self, answers: Iterable[Answer]) -> list[InProgress]:
        """Apply answers of environments: each ends its episode or starts the next turn.

        Return the episodes that ended. Raises ConfigError for an environment that is used wrongly.
        """
        return [ended for answer in answers if (ended := self._advance(answer))]

    def step(self) -> list[InProgress]:
        """Run an engine step if turns are being generated. Return the episodes that ended.

        Raises EngineFailure.
        """
        if not self.runs:
            return []
        self.steps += 1
        return self.hand_over(self._engine.step())

    def hand_over(self, turns: Iterable[Finished]) -> list[InProgress]:
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

    def _advance(self, answer: Answer) -> InProgress | None:
        """Apply an answer. Return the episode if it has ended."""
        del self.asked[answer.index]
        if answer.misuse:
            raise ConfigError(answer.misuse)
        episode = self.playing[answer.index].episode
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

    def _pass_on(self, finished: Finished) -> InProgress | None:
        """Pass a turn to its environment, unless it ended the episode. Return the episode if it has ended."""
        index = int(finished.request_id)
        episode = self.playing[index].episode
        episode.add_turn(finished)
        self.tokens += len(finished.token_ids)
        if episode.outcome is not None:
            return self._end(index)
        self.asked[index] = None
        if self._host:
            self._host.step(index, episode.completion(finished))
        return None

    def _end(self, index: int) -> InProgress:
        if self._host:
            self._host.close(index)
        return self.playing.pop(index)

    def _generate(self, index: int) -> None:
        playing = self.playing[index]
        episode = playing.episode
        self._engine.add(
            str(index),
            episode.context,
            seed=request_seed(playing.seed, playing.place, episode.played + 1),
            max_tokens=episode.max_tokens,
            temperature=playing.temperature,
            top_p=playing.top_p,
            stop_strings=episode.stop_strings,
        )


def request_seed(seed: int, place: int, turn: int) -> int:
    """Return a seed of 63 bits that depends on all three numbers.

    It is the same in every process; the values of Python's `hash` are not.
    """
    digest = hashlib.blake2b(f"{seed}/{place}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
