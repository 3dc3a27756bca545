"""Scripted trajectories that teach how to search.

The model learns to copy the description into a query, and the title of the document into the answer. Stages
and shares are those of the quickstart: 80 % of the trajectories are about made-up terms, and in the last
tenth 70 % answer without searching, with any of the four options. These trajectories teach how to search;
reinforcement learning teaches when to search.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from entries import LETTERS, Choice, Entry, choice
from trajectories import GUESS_SHARE, MADE_UP_SHARE, MAX_CHARACTERS
from transformers import PreTrainedTokenizerFast

from megatron_stppo.environments.retrieval import Document
from megatron_stppo.environments.search import render


@dataclass(frozen=True)
class Inventor:
    """Make terms out of the tokenizer's pieces, and meaningless descriptions out of real words.

    New terms are needed because a model memorises terms that recur, instead of copying them.
    """

    rng: random.Random
    real: frozenset[str]  # names that must not be invented
    beginnings: Sequence[str]
    continuations: Sequence[str]
    words: Sequence[str]

    def entries(self, like: Entry, number: int) -> list[Entry]:
        """Return `number` entries with different names.

        Their first phrase has as many words as that of `like`. The rest of the gloss is unchanged.
        """
        names: set[str] = set()
        while len(names) < number:
            names.add(self._name())
        return [Entry(like.category, name, self._gloss(like)) for name in sorted(names)]

    def _gloss(self, like: Entry) -> str:
        phrase = " ".join(self.rng.choice(self.words) for _ in like.query.split())
        return phrase + like.gloss[len(like.query) :]

    def _name(self) -> str:
        while True:
            name = " ".join(self._word() for _ in range(self.rng.choice((1, 1, 2))))
            if name not in self.real:
                return name

    def _word(self) -> str:
        return self.rng.choice(self.beginnings) + "".join(
            self.rng.choice(self.continuations) for _ in range(self.rng.randint(0, 3))
        )


def pieces(tokenizer: PreTrainedTokenizerFast) -> tuple[list[str], list[str]]:
    """Return the vocabulary entries for made-up terms: those that begin a word, those that continue one."""
    texts = [tokenizer.decode([i]) for i in range(len(tokenizer))]
    return (
        [text.strip() for text in texts if re.fullmatch(r" [A-Za-z][a-z]*", text)],
        [text for text in texts if re.fullmatch(r"[a-z]{1,5}", text)],
    )


class Script:
    """Write rows for the entries of the cold start. Documents are rendered as in the environment."""

    def __init__(self, known: Sequence[Entry], inventor: Inventor, seed: int) -> None:
        self._known, self._inventor = known, inventor
        self._rng = random.Random(f"{seed}/script")
        self._by_category = defaultdict(list)
        for entry in known:
            self._by_category[entry.category].append(entry)

    def rows(self, stage: str) -> Iterator[dict[str, Any]]:
        """Yield rows of a stage, without end."""
        while True:
            asked = self._draw()
            guess = stage == "policy" and self._rng.random() < GUESS_SHARE
            segments = [_answer(self._rng.choice(asked.options))] if guess else _search(asked)
            yield {
                "prompt": [{"role": "user", "content": asked.text}],
                "segments": [{"text": text, "kind": kind} for text, kind in segments],
                "stage": stage,
            }

    def _draw(self) -> Choice:
        right = self._rng.choice(self._known)
        others = self._by_category[right.category]
        if self._rng.random() < MADE_UP_SHARE:
            others = self._inventor.entries(right, len(LETTERS))
            right = self._rng.choice(others)
        return choice(right, others, self._rng)


def document(entry: Entry) -> str:
    return render([Document("", entry.name, entry.gloss, 1.0)], MAX_CHARACTERS)


def _search(asked: Choice) -> list[tuple[str, str]]:
    """Return the segments of a search.

    A space follows every tag, so that a term has the same tokens in option, title and answer.
    """
    return [
        (f"<search> {asked.right.query}</search>", "turn"),
        (document(asked.right), "observation"),
        _answer(asked.right.name),
    ]


def _answer(name: str) -> tuple[str, str]:
    return f"<answer> {name}</answer>", "turn"
