"""The names that have a row in docs/metrics.md and docs/algorithms.md."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
NAME = re.compile(r"`([^`]+)`")


def rows(document: str) -> list[list[str]]:
    """Return the cells of every row of every table in a document."""
    lines = (DOCS / document).read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]


def metrics() -> list[str]:
    """Return the names of metrics as the document writes them. Example: ["iteration", "seconds/PHASE"]."""
    return [name for cells in rows("metrics.md") for name in NAME.findall(cells[0])]


def matches(written: str, name: str) -> bool:
    """Return whether `name` is an instance of `written`.

    Example: actor/clip_fraction_turn_N stands for actor/clip_fraction_turn_3.
    """
    return re.fullmatch(re.sub(r"[A-Z]+", "[a-z0-9]+", written), name) is not None


def undocumented(names: Iterable[str]) -> list[str]:
    return [name for name in names if not any(matches(written, name) for written in metrics())]


def unreported(names: Iterable[str]) -> list[str]:
    """Return the documented metrics that match none of the names."""
    given = list(names)
    return [written for written in metrics() if not any(matches(written, name) for name in given)]
