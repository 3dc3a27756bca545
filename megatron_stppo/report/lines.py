"""JSON lines as they are found: half written, cut off by a full disk, or made by somebody who means harm."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAX_LINE = 2**24  # bytes; a longer one is passed over without being held
LARGEST = 1e300  # of a number; sums of larger ones are infinite, which JSON cannot say


class Lines:
    """The objects of a file, with the numbers of their lines, from 0. `damaged` counts the other lines.

    Example: the lines {"a": 1}, [2] and {"a" give (0, {"a": 1}), and damaged is 2.
    """

    def __init__(self, path: Path) -> None:
        self._path, self.damaged = path, 0

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Raises OSError for a file that cannot be read."""
        with self._path.open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE):
                record = _object(line) if _skip_rest(file, line) else None
                if record is not None:
                    yield number, record
                elif line.strip():
                    self.damaged += 1
                number += 1


def number(value: Any) -> float | None:
    """A number that others can be added to, or None. Example: number(True) and number("1") are None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= LARGEST else None


def damaged(lines: Lines) -> str:
    """Example: "1 damaged line left out"."""
    return f"{lines.damaged} damaged line{'' if lines.damaged == 1 else 's'} left out"


def short(value: float) -> float:
    """Six digits: what a curve or a person can tell apart."""
    return float(f"{value:.6g}")


def _skip_rest(file: Any, line: bytes) -> bool:
    """Whether the line was whole; if not, what follows of it is read away."""
    whole = True
    while len(line) == MAX_LINE and not line.endswith(b"\n"):
        line, whole = file.readline(MAX_LINE), False
    return whole


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):  # also what is not UTF-8, and brackets by the thousand
        return None
    return value if isinstance(value, dict) else None
