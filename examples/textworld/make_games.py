"""Compile games of the package textworld, and write a data file of tasks for each split.

    python examples/textworld/make_games.py --output DIR [--challenge coin_collector] [--level 5] [--seed 0]

DIR/games/*.z8 and *.json  train.jsonl  evaluate.jsonl
A game takes 2 to 4 s of a core; as many are compiled at a time as the machine has cores.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "quickstart"))  # before an installed package `build`
from build import write_rows
from text_games import KIND, opened, room_text

SIZES = {"train": 64, "evaluate": 32}
SEEDS = {"train": 1, "evaluate": 2}  # times a million, plus 1,000 times the run's, plus the game's number
MAKER = Path(sys.executable).with_name("tw-make")
# The package's settings of the cooking game, from easy to hard. Coin collectors have levels of the package.
COOKING = (
    "--recipe 1 --take 1",
    "--recipe 1 --take 1 --open",
    "--recipe 1 --take 1 --open --go 6",
    "--recipe 1 --take 1 --open --go 6 --cook",
    "--recipe 2 --take 2 --open --go 9 --cook --cut",
    "--recipe 3 --take 3 --open --go 12 --cook --cut --drop",
)
INSTRUCTION = "\n\nWrite one command of the game per turn, such as <command> go north</command>."


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder to write to")
    parser.add_argument("--challenge", choices=("coin_collector", "cooking"), default="coin_collector")
    parser.add_argument("--level", type=int, default=5, help="1 to 300, or 1 to 6 for cooking")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
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
    (folder / "games").mkdir(parents=True, exist_ok=True)
    settings = ["--level", str(level)] if challenge == "coin_collector" else COOKING[level - 1].split()

    def make(number: int) -> Path:
        path = folder / "games" / f"{challenge}-{level}-{split}-{seed}-{number}.z8"
        game_seed = SEEDS[split] * 10**6 + seed * 1000 + number
        line = [MAKER, f"tw-{challenge}", *settings, "--seed", str(game_seed), "--output", path]
        subprocess.run([*line, "--silent", "--force"], check=True)
        progress()
        return path

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(make, range(size)))


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
