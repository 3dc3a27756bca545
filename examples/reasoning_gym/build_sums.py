"""Build the files of the chain-sum example with reasoning-gym, with the steps of the quickstart's builder.

    python examples/reasoning_gym/build_sums.py --output DIR [--seed 0] [--tokens 3000000]

DIR/model/  train.jsonl  evaluate.jsonl  demonstrations.jsonl  manifest.json
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "quickstart"))  # before an installed package `build`
from build import command, demonstrations, write_rows
from gym_tasks import CORRECTION, RETRY, task_rows
from rich.progress import Progress, TimeElapsedColumn
from sums import SETTINGS, Script, working
from tiny_model import train_tokenizer, write_model

VERSION = 1  # raise it if the same arguments now give different files
SIZES = {"train": 2048, "evaluate": 256}
SEEDS = {"train": 1, "evaluate": 2, "cold_start": 3}  # times a million, plus the run's


def main(argv: Sequence[str] | None = None) -> None:
    command(build, __doc__.splitlines()[0], VERSION, 3_000_000, argv)


def build(folder: Path, seed: int, tokens: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn()) as progress:
        bar = progress.add_task("demonstration tokens", total=tokens)
        tasks = {split: list(_rows(split, size, seed)) for split, size in SIZES.items()}
        for split, rows in tasks.items():
            write_rows(folder / f"{split}.jsonl", rows)
        questions = [question(row) for rows in tasks.values() for row in rows]
        # A number is one token per digit: the tokenizer sees no two digits side by side, so it merges none.
        texts = [f"user\n{text}\nassistant\n{working(text)}" for text in questions[:512]] + [
            RETRY,
            CORRECTION,
        ]
        tokenizer = train_tokenizer(re.sub(r"(?<=\d)(?=\d)", "\n", text) for text in texts)
        write_model(folder / "model", tokenizer, seed)
        script = Script(SEEDS["cold_start"] * 10**6 + seed, frozenset(questions))
        rows = demonstrations(script, tokenizer, tokens, lambda done: progress.update(bar, completed=done))
        write_rows(folder / "demonstrations.jsonl", rows)


def _rows(split: str, size: int, seed: int) -> Any:
    return task_rows("chain_sum", split, size, SEEDS[split] * 10**6 + seed, instruction="", **SETTINGS)


def question(row: dict[str, Any]) -> str:
    return str(row["prompt"][0]["content"])


if __name__ == "__main__":
    main()
