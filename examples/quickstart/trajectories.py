"""Scripted trajectories that teach how to search: copy a name into a query, and an answer from a document.

80 % of them are about made-up entities, because a model memorises names that recur, instead of copying them.
In the last tenth 70 % answer without searching, and wrongly. These trajectories teach how to search;
reinforcement learning teaches when to search.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from facts import Entity, Fact
from questions import Question, one_hop, two_hop

from megatron_stppo.environments.retrieval import Document
from megatron_stppo.environments.search import render

MADE_UP_SHARE = 0.8
TWO_HOP_SHARE = 0.1
# {stage: share of all tokens after which it ends}, in training order.
STAGES = {"skill": 0.9, "policy": 1.0}
GUESS_SHARE = 0.7  # share of the policy stage's rows
MAX_CHARACTERS = 4000


@dataclass(frozen=True)
class Inventor:
    """Make fictitious entities with the structure of real ones, out of the tokenizer's pieces."""

    rng: random.Random
    real: frozenset[str]  # names that must not be invented
    beginnings: Sequence[str]
    continuations: Sequence[str]

    def entity(self, like: Entity, renamed: Mapping[str, str] | None = None) -> Entity:
        """Return an entity with the relations of `like`. `renamed` gives the values of some relations."""
        facts = []
        for fact in like.facts:
            value = (renamed or {}).get(fact.relation) or self._value(fact)
            facts.append(Fact(fact.relation, value, (value,)))
        return Entity(like.kind, self.name(), tuple(facts))

    def name(self) -> str:
        while True:
            name = " ".join(self._word() for _ in range(self.rng.choice((1, 1, 1, 2))))
            if name not in self.real:
                return name

    def _word(self) -> str:
        return self.rng.choice(self.beginnings) + "".join(
            self.rng.choice(self.continuations) for _ in range(self.rng.randint(0, 2))
        )

    def _value(self, fact: Fact) -> str:
        if fact.value.isdigit():
            return "".join(self.rng.choice("0123456789") for _ in fact.value)
        if fact.value.isupper():
            return "".join(self.rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in fact.value)
        return self.name()


class Script:
    """Write rows for the entities of the cold start. Passages are rendered as in the environment."""

    def __init__(self, entities: Sequence[Entity], inventor: Inventor, seed: int) -> None:
        self._entities, self._inventor = entities, inventor
        self._others = {entity.name: entity for entity in entities}
        self._rng = random.Random(f"{seed}/script")
        self._with_bridge = [entity for entity in entities if two_hop(entity, self._others)]

    def rows(self, stage: str) -> Iterator[dict[str, Any]]:
        """Yield rows of a stage, without end."""
        while True:
            prompt, segments = self._episode(stage)
            yield {
                "prompt": [{"role": "user", "content": prompt}],
                "segments": [{"text": text, "kind": kind} for text, kind in segments],
                "stage": stage,
            }

    def _episode(self, stage: str) -> tuple[str, list[tuple[str, str]]]:
        question = self._draw()
        if stage == "policy" and self._rng.random() < GUESS_SHARE:
            return question.text, self._guess(question)
        return question.text, _search(question)

    def _draw(self) -> Question:
        bridged = bool(self._with_bridge) and self._rng.random() < TWO_HOP_SHARE
        entity = self._rng.choice(self._with_bridge if bridged else self._entities)
        others: Mapping[str, Entity] = self._others
        if self._rng.random() < MADE_UP_SHARE:
            entity, others = self._invent(entity)
        return self._rng.choice(two_hop(entity, others) if bridged else one_hop(entity))

    def _invent(self, like: Entity) -> tuple[Entity, dict[str, Entity]]:
        """Return a made-up copy of `like`, and of every entity to which a two-hop question about it leads."""
        renamed, others = {}, {}
        for fact in like.facts:
            if fact.value in self._others:
                other = self._inventor.entity(self._others[fact.value])
                renamed[fact.relation], others[other.name] = other.name, other
        return self._inventor.entity(like, renamed), others

    def _guess(self, question: Question) -> list[tuple[str, str]]:
        wrong = self._inventor.entity(Entity("country", "", (question.answer,))).facts[0].value
        return [(f"<answer> {wrong}</answer>", "turn")]


def _search(question: Question) -> list[tuple[str, str]]:
    """Return the segments of the searches.

    A space follows every tag, so that a name has the same tokens in question, query, document and answer.
    """
    segments = []
    for hop in question.hops:
        segments.append((f"<search> {hop.query}</search>", "turn"))
        document = Document("", hop.entity.name, hop.passage, 1.0)
        segments.append((render([document], MAX_CHARACTERS), "observation"))
    return [*segments, (f"<answer> {question.answer.value}</answer>", "turn")]
