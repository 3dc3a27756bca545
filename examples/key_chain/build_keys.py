"""Build the files of the key chain: tasks, demonstrations, and the quickstart's model, which can copy words.

    python examples/key_chain/build_keys.py --output DIR [--seed 0] [--tokens 2000000]

DIR/model/  train-K.jsonl  evaluate-K.jsonl (K doors: 2, 4, 6)  demonstrations.jsonl  manifest.json
"""

from __future__ import annotations

import random
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "quickstart"))  # before an installed package `build`
from build import command, demonstrations, write_rows
from key_chain import SHUT, opened, task_row, task_rows, use
from rich.progress import Progress, TimeElapsedColumn
from transformers import AutoTokenizer, PreTrainedTokenizerFast

QUICKSTART = Path(__file__).parents[1] / "quickstart"
VERSION = 3  # raise it if the same arguments now give different files
DOORS = (2, 4, 6)
SIZES = {"train": 2048, "evaluate": 128}
WRONG_SHARE = {"skill": 0.0, "policy": 0.4}  # of the turns with two keys; 0 teaches to copy sooner


def main(argv: Sequence[str] | None = None) -> None:
    command(build, __doc__.splitlines()[0], VERSION, 2_000_000, argv)


def build(folder: Path, seed: int, tokens: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(QUICKSTART / "model", folder / "model", dirs_exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model", trust_remote_code=False)
    words = one_token_words(tokenizer)
    for doors in DOORS:
        for split, size in SIZES.items():
            write_rows(folder / f"{split}-{doors}.jsonl", task_rows(seed, words, doors, split, size))
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn()) as progress:
        bar = progress.add_task("demonstration tokens", total=tokens)
        script = Script(seed, words)
        rows = demonstrations(script, tokenizer, tokens, lambda done: progress.update(bar, completed=done))
        write_rows(folder / "demonstrations.jsonl", rows)


def one_token_words(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Return the capital words that are one token after a space, so that every key has the same length."""
    pieces = (tokenizer.decode([index]) for index in range(len(tokenizer)))
    words = (piece for piece in pieces if re.fullmatch(r" [A-Z][a-z]{3,}", piece))
    return sorted(word.strip() for word in words if len(tokenizer.tokenize(word)) == 1)


class Script:
    """Writes scripted episodes. In the last stage many keys are of the other kind."""

    def __init__(self, seed: int, words: Sequence[str]) -> None:
        self._generator, self._words = random.Random(f"{seed}/script"), words

    def rows(self, stage: str) -> Iterator[dict[str, Any]]:
        """Yield rows of a stage, without end."""
        while True:
            doors = self._generator.choice(DOORS)
            row = task_row(self._generator, self._words, doors, "cold_start", 0)
            segments = self._episode(row, WRONG_SHARE[stage])
            yield {
                "prompt": row["prompt"],
                "segments": [{"text": text, "kind": kind} for text, kind in segments],
                "stage": stage,
            }

    def _episode(self, row: dict[str, Any], wrong_share: float) -> Iterator[tuple[str, str]]:
        """Yield (text, kind) of the segments. After a wrong key the episode uses it again until its end."""
        targets, rooms = row["reward_model"]["ground_truth"]["target"], row["extra_info"]["rooms"]
        wrong = ""
        for n, (target, room) in enumerate(zip(targets, rooms, strict=True), 1):
            others = [key for key in room.values() if key != target]
            if others and not wrong and self._generator.random() < wrong_share:
                wrong = others[0]
            yield use(wrong or target), "turn"
            if n < len(targets):
                yield SHUT if wrong else opened(len(targets) - n, rooms[n]), "observation"


if __name__ == "__main__":
    main()
