"""Read JSON lines that may be incomplete, damaged or malicious."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MAX_LINE = 2**24  # bytes; a longer line is skipped without keeping it in memory
LARGEST = 1e300  # largest number; sums of larger ones may be infinite, which JSON lacks


class Lines:
    """Iterates over (line number from 0, object) of a file. `damaged` counts the other non-empty lines.

    Example: the lines {"a": 1}, [2] and {"a" give (0, {"a": 1}), and damaged is 2.
    """

    def __init__(self, path: Path) -> None:
        self._path, self.damaged = path, 0

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield (line number, object). Raises OSError if the file cannot be read."""
        with self._path.open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE):
                record = _object(line) if _skip_rest(file, line) else None
                if record is not None:
                    yield number, record
                elif line.strip():
                    self.damaged += 1
                number += 1


@contextmanager
def reading(run: Path, name: str, notes: list[str]) -> Iterator[Lines]:
    """Yield the lines of a file of the run. Add a note for what is damaged, or if it cannot be read.

    Example of a note: "metrics.jsonl: 1 damaged line left out".
    """
    lines = Lines(run / name)
    try:
        yield lines
    except OSError as error:
        notes.append(f"{name} cannot be read: {error.strerror}")
    if lines.damaged:
        notes.append(f"{name}: {lines.damaged} damaged line{'' if lines.damaged == 1 else 's'} left out")


def number(value: Any) -> float | None:
    """Return `value` as a float, or None if it is not a usable number.

    Example: number(True) and number("1") are None.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= LARGEST else None


def short(value: float | None) -> float | None:
    """Return `value` rounded to six significant digits, enough for a curve or a table."""
    return None if value is None else float(f"{value:.6g}")


def _skip_rest(file: Any, line: bytes) -> bool:
    """Return whether `line` is complete; if not, read and discard the rest of it."""
    whole = True
    while len(line) == MAX_LINE and not line.endswith(b"\n"):
        line, whole = file.readline(MAX_LINE), False
    return whole


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):  # also for text that is not UTF-8, and for deeply nested brackets
        return None
    return value if isinstance(value, dict) else None
