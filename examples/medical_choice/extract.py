"""Make entries.jsonl from WordNet 3.0, so that the file can be reproduced and checked. No run needs this.

    apt-get download wordnet-base && dpkg -x wordnet-base_*.deb wordnet
    python examples/medical_choice/extract.py wordnet/usr/share/wordnet/data.noun

The entries are all nouns below six nouns of medicine, with their first name and their definition, unchanged.
Left out are examples of use, entries about animals and plants, slang, long names and definitions, and
definitions whose first phrase is too short or too long for a question.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from entries import ENTRIES, first_phrase

# {category: offset of its noun in data.noun}. An entry has the first category whose noun it lies below.
ROOTS = {
    "disease": "14061805",  # illness, unwellness, malady, sickness
    "symptom": "14299637",
    "body part": "05220461",
    "medicine": "03740161",  # medicine, medication, medicament
    "procedure": "01024392",  # medical procedure
    "disorder": "14052403",
}
MAX_NAME, MAX_GLOSS = 24, 160  # characters
PHRASE_WORDS = range(3, 11)
LEFT_OUT = re.compile(
    r"\b(animals?|arthropods?|birds?|cats?|cattle|cows?|crustaceans?|dogs?|fish|fishes|hoofs?|horses?|insects?|"
    r"invertebrates?|mammals?|mollus[ck]s?|plants?|reptiles?|ruminants?|sheep|snakes?|trees?|whales?|derogatory|"
    r"informal|obscene|offensive|slang|vulgar)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Noun:
    """Example: Noun("retinitis", "inflammation of the retina", ("14336539",))."""

    name: str
    gloss: str
    kinds: tuple[str, ...]  # offsets of its hypernyms: the nouns of which it is a kind


def read(path: Path) -> dict[str, Noun]:
    """Return the nouns of data.noun by offset. wndb(5WN) describes the format."""
    nouns = {}
    for line in path.read_text(encoding="ascii").splitlines():
        if line.startswith("  "):
            continue  # the licence
        fields, gloss = line.split(" | ", 1)
        offset, _, _, words, *rest = fields.split()
        pointers = rest[2 * int(words, 16) + 1 :]
        kinds = tuple(pointers[i + 1] for i in range(0, len(pointers), 4) if pointers[i] == "@")
        definition = re.sub(r'[;:]? *".*', "", gloss).strip()
        nouns[offset] = Noun(rest[0].replace("_", " "), definition, kinds)
    return nouns


def below(root: str, nouns: Mapping[str, Noun]) -> set[str]:
    children = defaultdict(list)
    for offset, noun in nouns.items():
        for kind in noun.kinds:
            children[kind].append(offset)
    found: set[str] = set()
    open_ = [root]
    while open_:
        new = [child for child in children[open_.pop()] if child not in found]
        found.update(new)
        open_ += new
    return found


def entries(nouns: Mapping[str, Noun]) -> Iterator[dict[str, str]]:
    names: set[str] = set()
    for category, root in ROOTS.items():
        for offset in sorted(below(root, nouns)):
            noun = nouns[offset]
            if is_wanted(noun) and noun.name.lower() not in names:
                names.add(noun.name.lower())
                yield {"id": offset, "category": category, "name": noun.name, "gloss": noun.gloss}


def is_wanted(noun: Noun) -> bool:
    phrase = first_phrase(noun.gloss)
    return (
        len(noun.name) <= MAX_NAME
        and len(noun.gloss) <= MAX_GLOSS
        and len(phrase.split()) in PHRASE_WORDS
        and noun.name.lower() not in phrase.lower()
        and not LEFT_OUT.search(f"{noun.name} {noun.gloss}")
    )


if __name__ == "__main__":
    with ENTRIES.open("w", encoding="utf-8") as file:
        for entry in entries(read(Path(sys.argv[1]))):
            file.write(json.dumps(entry) + "\n")
