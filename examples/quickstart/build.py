"""Build the quickstart's files from installed packages: corpus, index, model, tasks, demonstrations.

    python examples/quickstart/build.py --output DIR [--seed 0] [--tokens 1800000]

DIR/corpus.jsonl  index/  model/  train.jsonl  evaluate.jsonl  demonstrations.jsonl  manifest.json
The same seed gives the same files. A folder whose manifest matches the arguments is not built again.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from facts import Entity, entities
from questions import Hop, ask, row, split
from rich.progress import Progress, TimeElapsedColumn
from tiny_model import name_pieces, train_tokenizer, write_model
from trajectories import MAX_CHARACTERS, STAGES, TWO_HOP_SHARE, Inventor, Script
from transformers import PreTrainedTokenizerFast

from megatron_stppo.data.demonstrations import encode, validated
from megatron_stppo.environments.retrieval import BM25Retriever, Document
from megatron_stppo.environments.search import render

VERSION = 7  # raise it if the same arguments now give different files
MAX_PIECES = 5  # most tokens of a name or an answer in a question


def main(argv: Sequence[str] | None = None) -> None:
    command(build, __doc__.splitlines()[0], VERSION, 1_800_000, argv)


def command(
    build: Callable[[Path, int, int], None],
    description: str,
    version: int,
    tokens: int,
    argv: Sequence[str] | None = None,
) -> None:
    """Call build(folder, seed, tokens), unless the folder's manifest shows that this has been done."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--output", type=Path, required=True, help="folder to write to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=tokens, help="tokens of demonstrations")
    arguments = parser.parse_args(argv)
    wanted = {"version": version, "seed": arguments.seed, "tokens": arguments.tokens}
    manifest = arguments.output / "manifest.json"
    if manifest.is_file() and json.loads(manifest.read_text(encoding="utf-8")) == wanted:
        print(f"{arguments.output}: already built")
        return
    manifest.unlink(missing_ok=True)
    build(arguments.output, arguments.seed, arguments.tokens)
    manifest.write_text(json.dumps(wanted) + "\n", encoding="utf-8")


def build(folder: Path, seed: int, tokens: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    known = entities()
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn()) as progress:
        steps = progress.add_task("corpus and index", total=4)
        retriever = write_corpus(known, folder)
        progress.update(steps, advance=1, description="tokenizer and model")
        tokenizer = train_tokenizer(tokenizer_texts(known, seed))
        write_model(folder / "model", tokenizer, seed)
        asked = (askable(entity, retriever, tokenizer) for entity in known)
        parts = split([entity for entity in asked if entity.facts], seed)
        progress.update(steps, advance=1, description="tasks")
        for name in ("train", "evaluate"):
            questions = ask(parts[name], TWO_HOP_SHARE, seed)
            write_rows(folder / f"{name}.jsonl", (row(q, name, i) for i, q in enumerate(questions)))
        progress.update(steps, advance=1, description="demonstrations")
        real = frozenset(entity.name for entity in known)
        inventor = Inventor(random.Random(f"{seed}/inventor"), real, *name_pieces(tokenizer))
        script = Script(parts["cold_start"], inventor, seed)
        bar = progress.add_task("demonstration tokens", total=tokens)
        rows = demonstrations(script, tokenizer, tokens, lambda done: progress.update(bar, completed=done))
        write_rows(folder / "demonstrations.jsonl", rows)
        progress.update(steps, advance=1, description="built")


def write_corpus(known: Sequence[Entity], folder: Path) -> BM25Retriever:
    passages = [(entity.name, entity.passage(fact)) for entity in known for fact in entity.facts]
    corpus = [{"id": str(i), "contents": f'"{title}"\n{text}'} for i, (title, text) in enumerate(passages)]
    write_rows(folder / "corpus.jsonl", corpus)
    BM25Retriever.build(corpus, folder / "index")
    return BM25Retriever(folder / "index")


def askable(entity: Entity, retriever: BM25Retriever, tokenizer: PreTrainedTokenizerFast) -> Entity:
    """Return the entity with only the facts that are short enough to copy and are found by their own query.

    BM25 cannot distinguish, for example, the two Congos. A name of seven tokens is hard for a model this
    small.
    """

    def short(text: str) -> bool:
        return len(tokenizer.tokenize(f" {text}")) <= MAX_PIECES

    hops = [Hop(entity, fact) for fact in entity.facts if short(entity.name) and short(fact.value)]
    found = [hop.fact for hop in hops if retriever.lookup(hop.query, 1)[0].text == hop.passage]
    return replace(entity, facts=tuple(found))


def tokenizer_texts(known: Sequence[Entity], seed: int) -> list[str]:
    """Return the texts for the tokenizer: every passage as an observation, every question as a chat."""
    documents = [
        render([Document("", entity.name, entity.passage(fact), 1.0)], MAX_CHARACTERS)
        for entity in known
        for fact in entity.facts
    ]
    questions = [question.text for question in ask(known, TWO_HOP_SHARE, seed)]
    return documents + [f"user\n{question}\nassistant\n" for question in questions]


def demonstrations(
    script: Script, tokenizer: PreTrainedTokenizerFast, tokens: int, progress: Callable[[int], None]
) -> Iterator[dict[str, Any]]:
    """Yield the rows of one stage after the other, together just under `tokens` tokens."""
    done = 0
    for stage, share in STAGES.items():
        rows, until = script.rows(stage), round(share * tokens)
        while done < until:
            chunk = list(islice(rows, 512))
            encoded = encode([validated(row) for row in chunk], tokenizer)
            for row_, demonstration in zip(chunk, encoded, strict=True):
                done += len(demonstration)
                if done > until:
                    break
                yield row_
            progress(min(done, until))


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
