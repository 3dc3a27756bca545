"""Reads the rows of a .jsonl file. Each is decoded separately, so that an error message names the row."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_stppo.config import ConfigError


def rows(path: Path, field: str) -> Iterator[tuple[str, Any]]:
    """Yield (where, value) for every line; `where` names the file and the row, from 1.

    field: the name of the file's field in the configuration or on the command line, for error messages.
    Raises ConfigError for a file that cannot be read, and for a line that is not one JSON value in UTF-8.
    Example: ("tasks.jsonl row 1", {"data_source": "nq"}).
    """
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                where = f"{path} row {number}"
                yield where, _value(line, where)
    except OSError as error:
        raise ConfigError(f"{field}={path}: cannot be read ({error.strerror}); give a .jsonl file") from None


def _value(line: bytes, where: str) -> Any:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{where}: is not UTF-8 (byte 0x{line[error.start]:02x} at position {error.start + 1}); save the "
            "file as UTF-8, for example with `iconv -f latin1 -t utf-8`"
        ) from None
    if text.startswith("\ufeff"):
        raise ConfigError(f"{where}: begins with a byte order mark; save the file as UTF-8 without one")
    if not text.strip():
        raise ConfigError(f"{where}: is empty; remove the line")
    try:
        return json.loads(text.rstrip())
    except json.JSONDecodeError as error:
        reason = f"{error.msg}, column {error.pos + 1}"
    except (ValueError, RecursionError) as error:  # for example 5,000 digits or 10,000 brackets
        reason = str(error)
    raise ConfigError(f"{where}: is not JSON ({reason}); give one object per line, or remove the line")
