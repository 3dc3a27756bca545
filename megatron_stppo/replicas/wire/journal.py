"""The journal of a replica: what was applied before which engine step. replica/news.py repeats a run from it.

A line of RUN_DIR/serving/journal/NAME.jsonl: {"step": 12, "assigned": [], "answers": [70, 64], "version":
null, "hold": false}. The first line is that of the version with which the replica joined.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from megatron_stppo.config import ConfigError

FOLDER = Path("serving", "journal")
MOST_BYTES = 2**20  # of a line
Record = TypeVar("Record")


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was applied before engine step `step`. Example: Line(12, (), (70, 64), None) has two answers."""

    step: int  # engine steps so far
    assigned: tuple[int, ...]  # numbers of the episodes that begin, in order
    answers: tuple[int, ...]  # numbers of the episodes whose environments answered, in order
    version: int | None  # that was received
    hold: bool = False  # whether turns are held from here to the next version


class Journal:
    """Writes the lines of a replica. A line is on its way to the disk before it is applied."""

    def __init__(self, run: Path, name: str) -> None:
        """Begin NAME.jsonl in the run's folder, or NAME-2.jsonl if an earlier replica had the name."""
        (run / FOLDER).mkdir(parents=True, exist_ok=True)
        for again in itertools.count(1):
            with contextlib.suppress(FileExistsError):
                path = run / FOLDER / (f"{name}.jsonl" if again == 1 else f"{name}-{again}.jsonl")
                self._file = path.open("xb")
                break

    def write(self, line: Line) -> None:
        """Write what is applied before an engine step, unless it is nothing."""
        if line != Line(line.step, (), (), None):
            self._file.write(msgspec.json.encode(line) + b"\n")
            self._file.flush()

    def close(self) -> None:
        self._file.close()


def read(run: Path, name: str) -> Iterator[Line]:
    """Yield the lines of the journal of a replica, as read_lines does."""
    return read_lines(run / FOLDER / f"{name}.jsonl", Line)


def read_lines(path: Path, type: type[Record]) -> Iterator[Record]:
    """Yield the records of a file. An incomplete last line, of a killed process, is left out.

    Raises ConfigError at once if there is no such file, and later if a line is damaged.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); give the folder of an asynchronous run"
        ) from None
    return _decoded(file, path, type)


def _decoded(file: IO[bytes], path: Path, type: type[Record]) -> Iterator[Record]:
    with file:
        for number in itertools.count(1):
            text = file.readline(MOST_BYTES)
            if not text.endswith(b"\n") and len(text) < MOST_BYTES:
                return
            try:
                yield msgspec.json.decode(text, type=type)
            except (msgspec.MsgspecError, RecursionError) as error:
                raise ConfigError(
                    f"{path}: line {number} cannot be used ({error}); give the file as it was written"
                ) from None
