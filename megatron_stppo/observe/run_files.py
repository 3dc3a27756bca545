"""The files of a run: paths of its trajectories, and rows of metrics.jsonl.

Does not import torch, so that tools that inspect a run start quickly.
"""

import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_stppo.base.files import replacing

log = logging.getLogger(__name__)
DIGEST = "trajectories/sha256"  # column of metrics.jsonl: the digest of the iteration's file
FOLDER, FILE = "trajectories", re.compile(r"iteration-([0-9]+)\.jsonl")
NUMBERED = re.compile(r"iteration-([0-9]+)\..+")  # turns too, and what is partly written


def played_path(run: Path, iteration: int) -> Path:
    """Return the path of an iteration's trajectories, one per line."""
    return run / FOLDER / f"iteration-{iteration:05d}.jsonl"


def turns_path(run: Path, iteration: int) -> Path:
    """Return the path of the update's values for each turn. No file if the update was refused."""
    return run / FOLDER / f"iteration-{iteration:05d}.turns.jsonl"


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


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows in order, without an incomplete last line."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def truncate(path: Path, last: int) -> None:
    """Keep only the complete rows up to iteration `last`; a resumed run writes the later ones again.

    Damaged lines are left out, with a warning: rows are not synchronised with the disk, so a node that loses
    power may leave zeros in their place.
    """
    if not path.exists():
        return
    kept, damaged = [], 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        if line.endswith("\n"):
            try:
                row = json.loads(line)
                kept += [json.dumps(row) + "\n"] if row["iteration"] <= last else []
            except (ValueError, AttributeError, KeyError, TypeError):
                damaged += 1
    if damaged:
        log.warning("%s: %d damaged lines are left out", path, damaged)
    with replacing(path) as scratch:
        scratch.write_text("".join(kept), encoding="utf-8")


def write_steps(path: Path, iteration: int, steps: Sequence[Mapping[str, float]]) -> None:
    """Append one row per optimizer step, numbered from 1.

    Deletes rows of this and later iterations from an earlier attempt. NaN and infinity become null.
    """
    truncate(path, iteration - 1)
    with path.open("a", encoding="utf-8") as file:
        for number, step in enumerate(steps, 1):
            finite = {name: value if math.isfinite(value) else None for name, value in step.items()}
            file.write(json.dumps({"iteration": iteration, "step": number} | finite) + "\n")


def column(rows: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Return (iterations, values) of the rows that have a number in column `name`.

    Example: rows {"iteration": 1, "kl": 0.5} and {"iteration": 2, "kl": null} give ([1], [0.5]).
    """
    found = [(row["iteration"], row[name]) for row in rows if row.get(name) is not None]
    return [iteration for iteration, _ in found], [float(value) for _, value in found]
