"""Build the files of the TextWorld example: compiled games and tasks, model, demonstrations.

    python examples/textworld/build_textworld.py --output DIR [--seed 0] [--tokens 1200000]

DIR/games/  model/  train.jsonl  evaluate.jsonl  demonstrations.jsonl  manifest.json
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "quickstart"))  # before an installed package `build`
from build import command, demonstrations, write_rows
from make_games import SIZES, compiled, task_rows
from rich.progress import Progress, TimeElapsedColumn
from text_games import REFUSED
from tiny_model import train_tokenizer, write_model
from walks import Script

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
        tokenizer = train_tokenizer([*texts(script), REFUSED], TAGS)
        write_model(folder / "model", tokenizer, seed)
        bar = progress.add_task("demonstration tokens", total=tokens)
        rows = demonstrations(script, tokenizer, tokens, lambda done: progress.update(bar, completed=done))
        write_rows(folder / "demonstrations.jsonl", rows)


def texts(script: Script, number: int = 256) -> list[str]:
    """Return the texts for the tokenizer: a number of walks, each as a chat."""
    rows = (row for row, _ in zip(script.rows(""), range(number), strict=False))
    return [
        f"user\n{row['prompt'][0]['content']}\nassistant\n" + "".join(s["text"] for s in row["segments"])
        for row in rows
    ]


if __name__ == "__main__":
    main()
