"""Build the files of the medical example from its entries, with the steps of the quickstart's builder.

    python examples/medical_choice/build_choice.py --output DIR [--seed 0] [--tokens 4000000]

The files are those of examples/quickstart/build.py. Their content comes from entries.jsonl instead of
packages.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "quickstart"))  # before an installed package `build`
from build import command, demonstrations, write_rows
from entries import Entry, ask, entries, row
from questions import split
from rich.progress import Progress, TimeElapsedColumn
from scripts import Inventor, Script, document, pieces
from tiny_model import train_tokenizer, write_model
from transformers import PreTrainedTokenizerFast

from megatron_stppo.environments.retrieval import BM25Retriever

VERSION = 1  # raise it if the same arguments now give different files
MAX_NAME, MAX_PHRASE, MAX_GLOSS = 6, 18, 56  # in tokens: a term, its description, its whole gloss


def main(argv: Sequence[str] | None = None) -> None:
    command(build, __doc__.splitlines()[0], VERSION, 4_000_000, argv)


def build(folder: Path, seed: int, tokens: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    known = entries()
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn()) as progress:
        steps = progress.add_task("corpus and index", total=3)
        retriever = write_corpus(known, folder)
        progress.update(steps, advance=1, description="tokenizer and model")
        questions = [f"user\n{asked.text}\nassistant\n" for asked in ask(known, seed)]
        tokenizer = train_tokenizer([*map(document, known), *questions])
        write_model(folder / "model", tokenizer, seed)
        progress.update(steps, advance=1, description="tasks")
        parts = split([entry for entry in known if is_askable(entry, retriever, tokenizer)], seed)
        for name in ("train", "evaluate"):
            tasks = ask(parts[name], seed)
            write_rows(folder / f"{name}.jsonl", (row(task, name, i) for i, task in enumerate(tasks)))
        bar = progress.add_task("demonstration tokens", total=tokens)
        words = [word for entry in parts["cold_start"] for word in entry.query.split()]
        real = frozenset(entry.name for entry in known)
        inventor = Inventor(random.Random(f"{seed}/inventor"), real, *pieces(tokenizer), words)
        script = Script(parts["cold_start"], inventor, seed)
        rows = demonstrations(script, tokenizer, tokens, lambda done: progress.update(bar, completed=done))
        write_rows(folder / "demonstrations.jsonl", rows)
        progress.update(steps, advance=1, description="built")


def write_corpus(known: Sequence[Entry], folder: Path) -> BM25Retriever:
    corpus = [{"id": str(i), "contents": f'"{entry.name}"\n{entry.gloss}'} for i, entry in enumerate(known)]
    write_rows(folder / "corpus.jsonl", corpus)
    BM25Retriever.build(corpus, folder / "index")
    return BM25Retriever(folder / "index")


def is_askable(entry: Entry, retriever: BM25Retriever, tokenizer: PreTrainedTokenizerFast) -> bool:
    """Return whether the entry is short enough to copy and is found first by its own description."""

    def tokens(text: str) -> int:
        return len(tokenizer.tokenize(f" {text}"))

    return (
        tokens(entry.name) <= MAX_NAME
        and tokens(entry.query) <= MAX_PHRASE
        and tokens(entry.gloss) <= MAX_GLOSS
        and retriever.lookup(entry.query, 1)[0].title == entry.name
    )


if __name__ == "__main__":
    main()
