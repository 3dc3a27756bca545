"""Paths of a run's trajectories. Does not import torch, so that tools that inspect a run start quickly."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

DIGEST = "trajectories/sha256"  # column of metrics.jsonl: the digest of the iteration's file
FOLDER, FILE = "trajectories", re.compile(r"iteration-([0-9]+)\.jsonl")
NUMBERED = re.compile(r"iteration-([0-9]+)\..+")  # turns too, and what is partly written


def played_path(run: Path, iteration: int) -> Path:
    """Return the path of an iteration's trajectories, one per line."""
    return run / FOLDER / f"iteration-{iteration:05d}.jsonl"


def turns_path(run: Path, iteration: int) -> Path:
    """Return the path of the update's values for each turn. No file if the update was refused."""
    return run / FOLDER / f"iteration-{iteration:05d}.turns.jsonl"


def digest_of(run: Path, iteration: int) -> str:
    """Return the SHA-256 of the file of an iteration's trajectories, in hexadecimal digits."""
    with played_path(run, iteration).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def recorded(run: Path) -> list[int]:
    """Return the iterations that have trajectories, in ascending order."""
    found = (FILE.fullmatch(path.name) for path in (run / FOLDER).glob("iteration-*"))
    return sorted({int(match[1]) for match in found if match})


def set_aside(run: Path, last: int, name: str) -> None:
    """Move the files of the iterations after `last` to trajectories/NAME/, which `recorded` leaves out.

    They are of an earlier attempt, which went further than the checkpoint that the run continues from.
    """
    found = [(NUMBERED.fullmatch(path.name), path) for path in (run / FOLDER).glob("iteration-*")]
    abandoned = [path for match, path in found if match and int(match[1]) > last]
    if abandoned:
        aside = run / FOLDER / name
        aside.mkdir(exist_ok=True)
        for path in abandoned:
            path.replace(aside / path.name)


def new_folder(parent: Path, name: str) -> Path:
    """Create and return parent/name, or the first of name-2, name-3, .. that does not exist, so that the
    episodes of an earlier evaluation are kept."""
    number = 1
    while True:
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1
