"""The tokens of one conversation of an episode: the prompt, turns and observations so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from megatron_stppo.base.types import Branch, Turn
from megatron_stppo.rollout.vllm.generation import Finished


@dataclass
class History:
    """One conversation.

    Example: begin((1, 2)), add(finished) with the token 7, and observe((3,)) give the context [1, 2, 7, 3].
    """

    prompt_ids: tuple[int, ...] = ()
    turns: list[Turn] = field(default_factory=list)
    context: list[int] = field(default_factory=list)  # prompt, turns and observations: the policy's input
    routes: bytearray = field(default_factory=bytearray)  # see Trajectory.routes

    def begin(self, ids: Sequence[int]) -> None:
        self.prompt_ids, self.context = tuple(ids), list(ids)

    def add(self, finished: Finished) -> None:
        self.turns.append(Turn(finished.token_ids, finished.logprobs, (), 0.0, finished.versions))
        self.context += finished.token_ids
        # A token that was computed again since an earlier turn keeps the experts of that turn.
        self.routes += finished.routes[len(self.routes) :]

    def observe(self, ids: Sequence[int]) -> None:
        """Append what the policy reads after the last turn."""
        self.turns[-1] = replace(self.turns[-1], observation_ids=tuple(ids))
        self.context += ids

    def credit(self, reward: float) -> None:
        """Set the reward of the last turn."""
        self.turns[-1] = replace(self.turns[-1], reward=reward)

    def branch(self) -> Branch:
        return Branch(self.prompt_ids, tuple(self.turns), bytes(self.routes))
