"""Real facts from two packages: countryinfo (countries) and mendeleev (chemical elements).

Some facts are outdated (a capital that moved, a currency that was replaced). This does not matter, because
the corpus and the questions come from the same source and agree with each other.
"""

from __future__ import annotations

import importlib.util
import re
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from countryinfo import CountryInfo, all_countries

MAX_NAME = 28  # characters; longer names would make long trajectories
# Countries that were dissolved or are listed twice.
LEFT_OUT = {"Serbia and Montenegro", "Burma", "Vatican City State", "Holy See (Vatican City State)"}


@dataclass(frozen=True)
class Fact:
    """A relation, its value in the passage, and all accepted answers.

    Example: Fact("currency", "USD", ("USD", "USN")).
    """

    relation: str
    value: str
    accepted: tuple[str, ...]


@dataclass(frozen=True)
class Entity:
    """Example: Entity("country", "Gabon", (Fact("capital", "Libreville", ("Libreville",)), ...))."""

    kind: Literal["country", "element"]
    name: str
    facts: tuple[Fact, ...]

    def value(self, relation: str) -> str | None:
        return next((fact.value for fact in self.facts if fact.relation == relation), None)

    def passage(self, fact: Fact) -> str:
        """Return the passage of one fact.

        Each fact has a passage of its own: the query names the fact, and the answer is always at the same
        place.

        Example: "The capital of Gabon is Libreville."
        """
        return f"The {fact.relation} of {self.name} is {fact.value}."


def entities() -> list[Entity]:
    """Return the countries, then the elements, each in the order of its package."""
    return [*_countries(), *_elements()]


def _fact(relation: str, value: object, *aliases: str) -> Iterator[Fact]:
    text = "" if value is None else str(value).strip()
    if 0 < len(text) <= MAX_NAME:
        yield Fact(relation, text, (text, *(alias for alias in aliases if alias != text)))


def _countries() -> Iterator[Entity]:
    countries = [country for country in all_countries() if country.name() not in LEFT_OUT]
    by_code = {country.iso(3): country for country in countries if country.iso(3)}
    for country in countries:
        currencies, codes = country.currencies(), country.calling_codes()
        facts = [
            *_fact("capital", country.capital()),
            *_fact("currency", *(currencies or [None])),
            *_fact("calling code", codes[0] if codes else None),
            *_fact("largest neighbour", _largest_neighbour(country, by_code)),
        ]
        if facts and len(country.name()) <= MAX_NAME:
            yield Entity("country", country.name(), tuple(facts))


def _largest_neighbour(country: CountryInfo, by_code: dict[str, CountryInfo]) -> str | None:
    neighbours = [by_code[code] for code in country.borders() if code in by_code]
    known = [neighbour for neighbour in neighbours if neighbour.area()]
    return max(known, key=lambda neighbour: neighbour.area()).name() if known else None


def _elements() -> Iterator[Entity]:
    """Yield the elements from the package's database: an import takes seconds and loads pandas."""
    spec = importlib.util.find_spec("mendeleev")
    assert spec is not None and spec.origin is not None
    database = sqlite3.connect(f"file:{Path(spec.origin).with_name('elements.db')}?mode=ro", uri=True)
    rows = database.execute(
        "select name, atomic_number, discoverers, discovery_year, discovery_location from elements "
        "order by atomic_number"
    ).fetchall()
    database.close()
    for name, number, discoverers, year, place in rows:
        facts = [
            *_fact("atomic number", number),
            *_fact("discoverer", _one_discoverer(discoverers)),
            *_fact("discovery year", year),
            *_fact("discovery place", None if place and "/" in place else place),
        ]
        yield Entity("element", name, tuple(facts))


def _one_discoverer(discoverers: str | None) -> str | None:
    """Return a single person, or None for several: a list of names has no unique right spelling."""
    if not discoverers or re.search(r"[,;]|\band\b|\d|\bet al\b|^Known", discoverers):
        return None
    return discoverers
