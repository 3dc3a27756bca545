"""Build the files of the TextWorld example: compiled games and tasks, model, demonstrations.

    python examples/textworld/build_textworld.py --output DIR [--seed 0] [--tokens 1200000]

DIR/games/  model/  train.jsonl  evaluate.jsonl  demonstrations.jsonl  manifest.json
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "quickstart"))  # before an installed package `build`
from build import command, write_rows
from make_games import SIZES, compiled, task_rows
from rich.progress import Progress, TimeElapsedColumn
from text_games import REFUSED
from tiny_model import train_tokenizer, write_model
from transformers import PreTrainedTokenizerFast
from walks import Script

from megatron_stppo.data.demonstrations import encode, validated

VERSION = 1  # raise it if the same arguments now give different files
LEVEL = 4  # of coin collectors: a chain of four rooms; 104 adds a dead end to each of them
TURNS = 10  # of a demonstration
TAGS = ("<command>", "</command>")


def main(argv: Sequence[str] | None = None) -> None:
    command(build, __doc__.splitlines()[0], VERSION, 1_200_000, argv)


def build(folder: Path, seed: int, tokens: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn()) as progress:
        games = progress.add_task("games", total=sum(SIZES.values()))
        tasks = {}
        for split, size in SIZES.items():
            paths = compiled(
                folder, split, "coin_collector", LEVEL, size, seed, lambda: progress.update(games, advance=1)
            )
            tasks[split] = list(task_rows(paths, split))
            write_rows(folder / f"{split}.jsonl", tasks[split])
        script = Script(tasks["train"], TURNS, seed)
        walks = islice(script.rows(), 4 * len(tasks["train"]))
        tokenizer = train_tokenizer([*map(chat, walks), REFUSED], TAGS)
        write_model(folder / "model", tokenizer, seed)
        bar = progress.add_task("demonstration tokens", total=tokens)
        rows = demonstrations(script, tokenizer, tokens, lambda done: progress.update(bar, completed=done))
        write_rows(folder / "demonstrations.jsonl", rows)


def chat(row: dict[str, Any]) -> str:
    """Return the text of a demonstration."""
    turns = "".join(segment["text"] for segment in row["segments"])
    return f"user\n{row['prompt'][0]['content']}\nassistant\n{turns}"


def demonstrations(
    script: Script, tokenizer: PreTrainedTokenizerFast, tokens: int, progress: Callable[[int], None]
) -> Iterator[dict[str, Any]]:
    """Yield rows with together just under `tokens` tokens."""
    done = 0
    for row in script.rows():
        (demonstration,) = encode([validated(row)], tokenizer)
        done += len(demonstration)
        progress(min(done, tokens))
        if done > tokens:
            return
        yield row


if __name__ == "__main__":
    main()
