"""Build the files of the search example: SmolLM2-135M-Instruct, corpus, index, questions, demonstrations.

    python examples/smollm2/build_search.py --output DIR [--seed 0] [--tokens 12000]

Demonstrations teach the form of a search and of an answer, with other relations, countries and elements.
DIR/model/  corpus.jsonl  index/  train.jsonl  evaluate.jsonl  demonstrations.jsonl  manifest.json
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "quickstart"))  # before an installed package `build`
from build import command, write_rows
from build_problems import within
from chains import Hop, chains, mixed, question, split
from pretrained import link_model
from relations import RELATIONS, Facts, Split, facts
from searcher import prompt, render
from transformers import AutoTokenizer

from megatron_stppo.environments.retrieval import BM25Retriever

VERSION = 1  # raise it if the same arguments now give different files
SIZES: Mapping[Split, int] = {"train": 2048, "evaluate": 128}
DEMONSTRATIONS = 60
DOCUMENTS = ("The {relation} of {x} is {v}.", "{v} is the {relation} of {x}.")
TOPK = 3  # documents of a search
MAX_TOKENS = 8  # of a name or a value: longer ones make long episodes


class Corpus(NamedTuple):
    """One document per fact, and its index. A fact is (x, relation)."""

    facts: Facts
    fact: Mapping[str, tuple[str, str]]  # of each document's id
    id: Mapping[tuple[str, str], str]  # of each fact's document
    retriever: BM25Retriever

    def finds(self, hop: Hop) -> bool:
        found = self.retriever.lookup(hop.query, TOPK)
        return self.id[hop.x, hop.relation] in {document.id for document in found}

    def askable(self) -> Facts:
        """Return the facts whose queries find them, in both directions if questions have both."""
        return {
            x: {
                relation: v
                for relation, v in of.items()
                if self.finds(Hop(relation, x, v))
                and (not RELATIONS[relation].inverse or self.finds(Hop(relation, x, v, True)))
            }
            for x, of in self.facts.items()
        }


def main(argv: Sequence[str] | None = None) -> None:
    command(build, __doc__.splitlines()[0], VERSION, 12_000, argv)


def build(folder: Path, seed: int, tokens: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(link_model(folder), trust_remote_code=False)

    def short(text: str) -> bool:
        return len(tokenizer.tokenize(f" {text}")) <= MAX_TOKENS

    known = {
        x: {relation: v for relation, v in of.items() if short(v)} for x, of in facts().items() if short(x)
    }
    corpus, inside = write_corpus(known, folder, seed), split(known, seed)
    askable = corpus.askable()
    for part, size in SIZES.items():
        rows = tasks(corpus, askable, inside[part], part, random.Random(f"{seed}/{part}"))
        write_rows(folder / f"{part}.jsonl", islice(rows, size))
    cold = chains(askable, inside["cold_start"], relations("cold_start"))
    rows = islice(demonstrations(corpus, cold, random.Random(f"{seed}/demonstrations")), DEMONSTRATIONS)
    write_rows(folder / "demonstrations.jsonl", within(tokens, rows, tokenizer))


def write_corpus(known: Facts, folder: Path, seed: int) -> Corpus:
    generator = random.Random(f"{seed}/corpus")
    of = [(x, relation) for x, relations in known.items() for relation in relations]
    generator.shuffle(of)
    fact = {f"{index:05}": one for index, one in enumerate(of)}
    rows = [
        {
            "id": id,
            "contents": generator.choice(DOCUMENTS).format(x=x, relation=relation, v=known[x][relation]),
        }
        for id, (x, relation) in fact.items()
    ]
    write_rows(folder / "corpus.jsonl", rows)
    BM25Retriever.build(rows, folder / "index")
    return Corpus(known, fact, {one: id for id, one in fact.items()}, BM25Retriever(folder / "index"))


def tasks(
    corpus: Corpus, askable: Facts, inside: Sequence[str], part: Split, generator: random.Random
) -> Iterator[dict[str, Any]]:
    """Yield tasks; for "evaluate", every other one has a relation that training does not have."""
    train = relations("train")
    kinds = {"known": mixed(chains(askable, inside, train), generator)}
    if part == "evaluate":
        both = chains(askable, inside, [*train, *relations("evaluate")])
        unseen = (one for one in both if not {hop.relation for hop in one} <= set(train))
        kinds["new"] = mixed(unseen, generator)
    index = 0
    while True:
        for kind, found in kinds.items():
            chain = next(found)
            path = [corpus.id[hop.x, hop.relation] for hop in chain]
            yield {
                "data_source": f"{len(chain)}_hops_{kind}",
                "prompt": prompt(question(chain, generator)),
                "reward_model": {"style": "rule", "ground_truth": {"target": [chain[-1].found]}},
                "extra_info": {"split": part, "index": index, "path": path},
            }
            index += 1


def relations(part: Split) -> list[str]:
    return [name for name, relation in RELATIONS.items() if relation.split == part]


def demonstrations(
    corpus: Corpus, found: Iterable[Sequence[Hop]], generator: random.Random
) -> Iterator[dict[str, Any]]:
    for chain in mixed(found, generator):
        segments = []
        for hop in chain:
            documents = render(corpus.retriever.lookup(hop.query, TOPK))
            segments.append({"kind": "turn", "text": f"search: {hop.query}\n"})
            segments.append({"kind": "observation", "text": documents})
        segments.append({"kind": "turn", "text": f"answer: {chain[-1].found}\n"})
        yield {"prompt": prompt(question(chain, generator)), "segments": segments}


if __name__ == "__main__":
    main()
