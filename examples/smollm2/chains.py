"""Questions that need two or three searches in order: chains of facts, named in everyday words."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from relations import RELATIONS, Facts, Split

SHARES: Mapping[Split, float] = {"cold_start": 0.25, "train": 0.45, "evaluate": 0.3}
MAX_HOPS = 3
PLAIN = 0.5  # share of the wordings that have the name of the relation
APART = 0.3  # share of the questions that name the last thing but one in a sentence of its own
OPENINGS = ("Think of {x}. ", "Here is a question about {x}. ", "I am reading about {x}. ")


class Hop(NamedTuple):
    """A fact to look up: from {x} to its value, or backwards, from the value to {x}.

    Example: the query of Hop("capital", "Gabon", "Libreville") is "capital of Gabon", and the value is found;
    that of Hop("capital", "Gabon", "Libreville", True) is "capital Libreville", and Gabon is found.
    """

    relation: str
    x: str
    v: str
    backwards: bool = False

    @property
    def query(self) -> str:
        return f"{self.relation} {self.v}" if self.backwards else f"{self.relation} of {self.x}"

    @property
    def found(self) -> str:
        return self.x if self.backwards else self.v


def split(known: Facts, seed: int) -> dict[Split, list[str]]:
    """Return disjoint sets of countries and elements."""
    names = sorted(known)
    random.Random(f"{seed}/split").shuffle(names)
    parts, start = {}, 0
    for part, share in SHARES.items():
        end = start + round(share * len(names))
        parts[part] = names[start:end]
        start = end
    return parts


def chains(known: Facts, inside: Iterable[str], relations: Sequence[str]) -> Iterator[tuple[Hop, ...]]:
    """Yield the chains of two and three hops, through countries and elements of `inside` only.

    No chain comes to the same place twice. It begins backwards only from a value that nothing else has.
    """
    allowed = set(inside)
    owners = Counter((relation, value) for of in known.values() for relation, value in of.items())
    starts: list[tuple[str, tuple[Hop, ...]]] = []
    for name in sorted(allowed):
        starts.append((name, ()))
        for relation in relations:
            value = known[name].get(relation)
            if value and RELATIONS[relation].inverse and owners[relation, value] == 1:
                starts.append((name, (Hop(relation, name, value, True),)))
    while starts:
        at, before = starts.pop()
        seen = {at, *(word for hop in before for word in (hop.x, hop.v))}
        for relation in relations:
            value = known[at].get(relation)
            if value is None or value in seen:
                continue
            path = (*before, Hop(relation, at, value))
            if len(path) > 1:
                yield path
            if RELATIONS[relation].names and value in allowed and len(path) < MAX_HOPS:
                starts.append((value, path))


def mixed(found: Iterable[tuple[Hop, ...]], generator: random.Random) -> Iterator[tuple[Hop, ...]]:
    """Yield chains without end, the lengths and then the sequences of relations equally often."""
    groups: dict[int, dict[tuple[str, ...], list[tuple[Hop, ...]]]] = defaultdict(lambda: defaultdict(list))
    for chain in found:
        groups[len(chain)][tuple(hop.relation for hop in chain)].append(chain)
    while True:
        for length in sorted(groups):
            yield generator.choice(generator.choice(list(groups[length].values())))


def question(chain: Sequence[Hop], generator: random.Random) -> str:
    """Return the question for the last value, which names the first thing only."""

    def wording(choices: Sequence[str]) -> str:
        """Return the first, which has the name of the relation, or any."""
        return choices[0] if generator.random() < PLAIN else generator.choice(choices)

    first, hops = chain[0], list(chain)
    name = first.x
    if first.backwards:
        name = wording(RELATIONS[first.relation].inverse).format(v=first.v)
        hops = hops[1:]
    for hop in hops[:-1]:
        name = wording(RELATIONS[hop.relation].names).format(x=name)
    last = RELATIONS[hops[-1].relation]
    ask = wording(last.asks)
    if generator.random() < APART:
        return generator.choice(OPENINGS).format(x=name) + ask.format(x=f"that {last.kind}")
    return ask.format(x=name)
