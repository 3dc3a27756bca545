"""Real facts as a graph: relations of countries and elements, and how people ask for them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from countryinfo import CountryInfo, all_countries
from facts import MAX_NAME, entities

Split = Literal["train", "evaluate", "cold_start"]
Facts = Mapping[str, Mapping[str, str]]  # {country or element: {relation: value}}


class Relation(NamedTuple):
    """A row of relations.jsonl: a relation of {x} to a value {v}, which may be a country or an element, too.

    Training never asks for the relations of "evaluate"; only the demonstrations have those of "cold_start".
    """

    name: str
    split: Split
    kind: str  # of {x}: "country", "element"
    asks: list[str]  # questions for the value
    names: list[str]  # the value, in the middle of a question
    inverse: list[str]  # {x}, in the middle of a question that names the value


ROWS = Path(__file__).with_name("relations.jsonl").read_text(encoding="utf-8").splitlines()
RELATIONS: Mapping[str, Relation] = {row["name"]: Relation(**row) for row in map(json.loads, ROWS)}


def facts() -> Facts:
    """Return the facts for all relations. Neighbours are countries, and so are most discovery places."""
    known = {
        entity.name: {fact.relation: fact.value for fact in entity.facts if fact.relation in RELATIONS}
        for entity in entities()
    }
    countries = {country.iso(3): country for country in all_countries() if country.name() in known}
    for country in countries.values():
        known[country.name()] |= {
            relation: str(value)
            for relation, value in _more(country, countries).items()
            if value and value != country.name() and len(str(value)) <= MAX_NAME
        }
    return known


def _more(country: CountryInfo, countries: Mapping[str, CountryInfo]) -> dict[str, object]:
    """Return facts that the quickstart does not use. The northern neighbour of the northernmost is itself."""
    near = [countries[border] for border in country.borders() if border in countries]
    sized = sorted((other.area(), other.name()) for other in near if other.area())
    peopled = sorted((other.population(), other.name()) for other in near if other.population())
    placed = [(other.latlng(), other.name()) for other in (*near, country) if other.latlng()]
    south_north, west_east = (sorted((at[axis], name) for at, name in placed) for axis in (0, 1))
    iso = country.iso()
    return {
        "demonym": country.demonym(),
        "internet domain": next(iter(country.tld() or ()), None),
        "smallest neighbour": sized[0][1] if sized else None,
        "most populous neighbour": peopled[-1][1] if peopled else None,
        "northern neighbour": south_north[-1][1] if placed else None,
        "southern neighbour": south_north[0][1] if placed else None,
        "eastern neighbour": west_east[-1][1] if placed else None,
        "western neighbour": west_east[0][1] if placed else None,
        "population": country.population(),
        "area": country.area(),
        "region": country.region(),
        "subregion": country.subregion(),
        "time zone": next(iter(country.timezones() or ()), None),
        "country code": iso.get("alpha3"),
        "short code": iso.get("alpha2"),
        "numeric code": iso.get("numeric"),
    }
