"""Real facts from two packages: countryinfo (countries) and mendeleev (chemical elements).

Some are old (a capital that moved, a currency that was replaced): the corpus and the questions come from the
same source, so they agree with each other.
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
# Dissolved or listed twice.
LEFT_OUT = {"Serbia and Montenegro", "Burma", "Vatican City State", "Holy See (Vatican City State)"}


@dataclass(frozen=True)
class Fact:
    """Example: Fact("currency", "USD", ("USD", "USN")): what the passage says, and every accepted answer."""

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
        """One fact, one passage: the query says which fact is wanted, and the answer stays in place.

        Example: "The capital of Gabon is Libreville."
        """
        return f"The {fact.relation} of {self.name} is {fact.value}."


def entities() -> list[Entity]:
    """Countries, then elements, each in its package's order."""
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
    """Reads the package's database directly: importing the package costs seconds and pulls in pandas."""
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
    """A single person, or nobody: a list of names has no one right spelling."""
    if not discoverers or re.search(r"[,;]|\band\b|\d|\bet al\b|^Known", discoverers):
        return None
    return discoverers
