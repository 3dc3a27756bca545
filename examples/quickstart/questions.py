"""Questions of one and two hops about the facts, and the split of the entities into three disjoint sets."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from facts import Entity, Fact

# The first hops of two-hop questions: relations whose value is the name of another entity.
BRIDGES = ("largest neighbour", "discovery place")
SECOND_HOP = ("capital", "currency", "calling code")
SHARES = {"cold_start": 0.4, "train": 0.4, "evaluate": 0.2}


@dataclass(frozen=True)
class Hop:
    """A fact to look up. Example: the query of Hop(gabon, capital) is "capital of Gabon"."""

    entity: Entity
    fact: Fact

    @property
    def query(self) -> str:
        return f"{self.fact.relation} of {self.entity.name}"

    @property
    def passage(self) -> str:
        return self.entity.passage(self.fact)


@dataclass(frozen=True)
class Question:
    """Example: Question("Name the capital of Gabon.", (Hop(gabon, capital),))."""

    text: str
    hops: tuple[Hop, ...]  # in order; the last one's fact is the answer

    @property
    def answer(self) -> Fact:
        return self.hops[-1].fact


def one_hop(entity: Entity) -> list[Question]:
    hops = [Hop(entity, fact) for fact in entity.facts]
    return [Question(f"Name the {hop.query}.", (hop,)) for hop in hops]


def two_hop(entity: Entity, others: Mapping[str, Entity]) -> list[Question]:
    """Return the two-hop questions about an entity.

    Example: "Name the capital of the largest neighbour of Gabon." Hop one is the neighbour, hop two its
    capital.
    """
    questions = []
    for bridge in entity.facts:
        other = others.get(bridge.value) if bridge.relation in BRIDGES else None
        for fact in other.facts if other else ():
            if fact.relation in SECOND_HOP:
                first, second = Hop(entity, bridge), Hop(other, fact)
                text = f"Name the {fact.relation} of the {first.query}."
                questions.append(Question(text, (first, second)))
    return questions


def split(entities: Sequence[Entity], seed: int) -> dict[str, list[Entity]]:
    """Split entities into disjoint sets.

    Example: of 10, 4 are for the cold start, 4 for training, 2 held out.
    """
    shuffled = list(entities)
    random.Random(f"{seed}/split").shuffle(shuffled)
    parts: dict[str, list[Entity]] = {}
    start = 0.0
    for name, share in SHARES.items():
        end = start + share
        parts[name] = shuffled[round(start * len(shuffled)) : round(end * len(shuffled))]
        start = end
    return parts


def ask(entities: Iterable[Entity], two_hop_share: float, seed: int) -> list[Question]:
    """Return all one-hop questions and at most `two_hop_share` two-hop ones, which stay within `entities`."""
    rng = random.Random(f"{seed}/ask")
    known = {entity.name: entity for entity in entities}
    single = [question for entity in known.values() for question in one_hop(entity)]
    double = [question for entity in known.values() for question in two_hop(entity, known)]
    rng.shuffle(double)
    questions = single + double[: round(len(single) * two_hop_share / (1 - two_hop_share))]
    rng.shuffle(questions)
    return questions


def row(question: Question, split: str, index: int) -> dict[str, Any]:
    """Return a task in the verl schema."""
    return {
        "data_source": "quickstart",
        "prompt": [{"role": "user", "content": question.text}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": list(question.answer.accepted)}},
        "extra_info": {"split": split, "index": index, "hops": len(question.hops)},
    }
