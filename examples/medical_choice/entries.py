"""The bundled extract of WordNet: medical terms with their definitions, and questions about them."""

from __future__ import annotations

import json
import random
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENTRIES = Path(__file__).with_name("entries.jsonl")
LETTERS = "ABCD"


@dataclass(frozen=True)
class Entry:
    """Example: Entry("symptom", "adenitis", "inflammation of a gland or lymph node")."""

    category: str
    name: str
    gloss: str

    @property
    def query(self) -> str:
        return first_phrase(self.gloss)


@dataclass(frozen=True)
class Choice:
    """A question with options of one category. One option is right."""

    right: Entry
    options: tuple[str, ...]  # names, in the order shown

    @property
    def text(self) -> str:
        """Example: "Which term means inflammation of a gland or lymph node?\\nA) adenitis\\nB) gout\\n.."."""
        options = "".join(f"\n{letter}) {name}" for letter, name in zip(LETTERS, self.options, strict=True))
        return f"Which term means {self.right.query}?{options}"


def first_phrase(gloss: str) -> str:
    """Example: first_phrase("a sudden attack (as of a disease); brief") == "a sudden attack"."""
    return re.split(r"\s*[;:,(]", gloss, maxsplit=1)[0].strip()


def entries() -> list[Entry]:
    rows = [json.loads(line) for line in ENTRIES.read_text(encoding="utf-8").splitlines()]
    return [Entry(row["category"], row["name"], row["gloss"]) for row in rows]


def ask(asked: Sequence[Entry], seed: int) -> list[Choice]:
    """Return one question per entry, in random order. The wrong options are other entries of `asked`."""
    rng = random.Random(f"{seed}/ask")
    by_category = defaultdict(list)
    for entry in asked:
        by_category[entry.category].append(entry)
    choices = [choice(entry, by_category[entry.category], rng) for entry in asked]
    rng.shuffle(choices)
    return choices


def choice(right: Entry, others: Sequence[Entry], rng: random.Random) -> Choice:
    """Return a question whose wrong options are drawn from `others`: at least three besides `right`."""
    wrong = rng.sample([entry.name for entry in others if entry.name != right.name], len(LETTERS) - 1)
    options = [right.name, *wrong]
    rng.shuffle(options)
    return Choice(right, tuple(options))


def row(asked: Choice, split: str, index: int) -> dict[str, Any]:
    """Return a task in the verl schema. The answer is the text of the right option."""
    return {
        "data_source": "medical_choice",
        "prompt": [{"role": "user", "content": asked.text}],
        "ability": "medical-choice",
        "reward_model": {"style": "rule", "ground_truth": {"target": [asked.right.name]}},
        "extra_info": {"split": split, "index": index, "category": asked.right.category},
    }
