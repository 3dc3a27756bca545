"""Questions of one and two hops about the facts, and their split by entity into three disjoint sets."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from facts import Entity, Fact

# The first hop of a two-hop question: relation whose value names another passage.
BRIDGES = {"largest neighbour": "largest neighbour of {}", "discovery place": "discovery place of {}"}
SECOND_HOP = ("capital", "currency", "calling code")
SHARES = {"cold_start": 0.4, "train": 0.4, "evaluate": 0.2}


@dataclass(frozen=True)
class Question:
    """Example: Question("What is the capital of Gabon?", ("Gabon",), Fact("capital", "Libreville", ...))."""

    text: str
    hops: tuple[str, ...]  # names to look up, in order
    answer: Fact


def one_hop(entity: Entity) -> list[Question]:
    return [
        Question(f"What is the {fact.relation} of {entity.name}?", (entity.name,), fact)
        for fact in entity.facts
    ]


def two_hop(entity: Entity, others: Mapping[str, Entity]) -> list[Question]:
    """Example: "What is the capital of the largest neighbour of Gabon?", looking up Gabon, then Cameroon."""
    questions = []
    for relation, phrase in BRIDGES.items():
        other = others.get(entity.value(relation) or "")
        for fact in other.facts if other else ():
            if fact.relation in SECOND_HOP:
                text = f"What is the {fact.relation} of the {phrase.format(entity.name)}?"
                questions.append(Question(text, (entity.name, other.name), fact))
    return questions


def split(entities: Sequence[Entity], seed: int) -> dict[str, list[Entity]]:
    """Disjoint sets of entities. Example: 10 give 4 for the cold start, 4 to train on, 2 to evaluate."""
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
    """All one-hop questions and at most the share of two-hop ones, which lead to entities of the same set."""
    rng = random.Random(f"{seed}/ask")
    known = {entity.name: entity for entity in entities}
    single = [question for entity in known.values() for question in one_hop(entity)]
    double = [question for entity in known.values() for question in two_hop(entity, known)]
    rng.shuffle(double)
    questions = single + double[: round(len(single) * two_hop_share / (1 - two_hop_share))]
    rng.shuffle(questions)
    return questions


def row(question: Question, split: str, index: int) -> dict[str, Any]:
    """A task in the verl schema."""
    return {
        "data_source": "quickstart",
        "prompt": [{"role": "user", "content": question.text}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": list(question.answer.accepted)}},
        "extra_info": {"split": split, "index": index, "hops": len(question.hops)},
    }
