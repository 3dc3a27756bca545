"""Compile games of the package textworld, and write a data file of tasks for each split.

    python examples/textworld/make_games.py --output DIR [--challenge coin_collector] [--level 5] [--seed 0]

DIR/games/*.z8 and *.json  train.jsonl  evaluate.jsonl
A game takes 1 to 3 s of a core.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "quickstart"))  # before an installed package `build`
from build import write_rows
from text_games import KIND, opened, room_text
from textworld import GameOptions
from textworld.challenges import CHALLENGES
from textworld.generator import compile_game

SIZES = {"train": 64, "evaluate": 32}
SEEDS = {"train": 1, "evaluate": 2}  # times a million, plus 1,000 times the run's, plus the game's number
# The package's settings of the cooking game, from easy to hard. Coin collectors have levels of the package.
COOKING: tuple[dict[str, Any], ...] = (
    {"take": 1},
    {"take": 1, "open": True},
    {"take": 1, "open": True, "go": 6},
    {"take": 1, "open": True, "go": 6, "cook": True},
    {"take": 2, "open": True, "go": 9, "cook": True, "cut": True, "recipe": 2},
    {"take": 3, "open": True, "go": 12, "cook": True, "cut": True, "recipe": 3, "drop": True},
)
INSTRUCTION = "\n\nWrite one command of the game per turn, such as <command> go north</command>."


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder to write to")
    parser.add_argument("--challenge", choices=("coin_collector", "cooking"), default="coin_collector")
    parser.add_argument("--level", type=int, default=5, help="1 to 300, or 1 to 6 for cooking")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    if not 1 <= given.level <= (most := 300 if given.challenge == "coin_collector" else len(COOKING)):
        parser.error(f"--level {given.level}: {given.challenge} has levels 1 to {most}")
    for split, size in SIZES.items():
        games = compiled(given.output, split, given.challenge, given.level, size, given.seed)
        write_rows(given.output / f"{split}.jsonl", task_rows(games, split, INSTRUCTION))


def compiled(
    folder: Path,
    split: str,
    challenge: str,
    level: int,
    size: int,
    seed: int,
    progress: Callable[[], None] = lambda: None,
) -> list[Path]:
    """Compile `size` games of a split into folder/games and return their files. Calls progress() after each.

    challenge, level: ("coin_collector", 1 to 300) or ("cooking", 1 to 6).
    Example: compiled(folder, "train", "cooking", 2, 64, seed=0).
    """
    _, make, _ = CHALLENGES[f"tw-{challenge}"]
    cooking = {"recipe_seed": 0, "split": None} | COOKING[level - 1] if challenge == "cooking" else {}
    paths = []
    for number in range(size):
        paths.append(folder / "games" / f"{challenge}-{level}-{split}-{seed}-{number}.z8")
        options = GameOptions()
        options.seeds = SEEDS[split] * 10**6 + seed * 1000 + number
        options.path, options.force_recompile = str(paths[-1]), True
        compile_game(make({"level": level} | cooking, options), options)
        progress()
    return paths


def task_rows(games: Sequence[Path], split: str, instruction: str = "") -> Iterator[dict[str, Any]]:
    """Yield a row in the verl schema for each game. The prompt is the text of its first room.

    The objective of a coin collector is not shown: it names the way.
    """
    for index, path in enumerate(games):
        game = opened(path)
        first = game.reset()
        yield {
            "data_source": f"{KIND}/{path.stem.partition('-')[0]}",
            "prompt": [{"role": "user", "content": room_text(first.feedback) + instruction}],
            "reward_model": {
                "style": "rule",
                "ground_truth": {"target": ["\n".join(first["extra.walkthrough"])]},
            },
            "extra_info": {"split": split, "index": index, KIND: {"game": str(path)}},
        }
        game.close()


if __name__ == "__main__":
    main()
