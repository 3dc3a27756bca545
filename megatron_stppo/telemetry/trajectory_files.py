"""Where a run's trajectories lie. Free of torch, so that looking at a run costs nothing."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER, FILE = "trajectories", re.compile(r"iteration-([0-9]+)\.jsonl")


def played_path(run: Path, iteration: int) -> Path:
    """What the policy did in an iteration, a line per trajectory."""
    return run / FOLDER / f"iteration-{iteration:05d}.jsonl"


def turns_path(run: Path, iteration: int) -> Path:
    """What the update made of it, line for line; there is none where it was refused."""
    return run / FOLDER / f"iteration-{iteration:05d}.turns.jsonl"


def recorded(run: Path) -> list[int]:
    """Iterations whose trajectories are there, in order, each once."""
    found = (FILE.fullmatch(path.name) for path in (run / FOLDER).glob("iteration-*"))
    return sorted({int(match[1]) for match in found if match})


def new_folder(parent: Path, name: str) -> Path:
    """Make and return parent/name, or the first of name-2, name-3, .. that is not there: the episodes of an
    earlier evaluation stay."""
    number = 1
    while True:
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1
