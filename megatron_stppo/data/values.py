"""The rows of a .jsonl file, and the form in which an environment gets the values of a row: those of JSON.

A value has the same form wherever the environment runs: in the run's own process, in a replica, or as a
command that gets its task as JSON. So it is converted once, when the file is read.
"""

import datetime
import json
import math
from base64 import b64encode
from collections.abc import Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np

from megatron_stppo.config import ConfigError


def jsonl_rows(path: Path, field: str) -> Iterator[tuple[str, Any]]:
    """Yield (where, value) for every line of a .jsonl file; `where` names the file and the row, from 1.

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


DEEPEST = 100  # lists and objects in each other; a few hundred would exceed Python's limit on recursion


def plain(value: Any, where: str, field: str, depth: int = 0) -> Any:
    """Return the value made of dicts, lists, texts, numbers, True, False and None only.

    A decimal number becomes text, because a float would round it; a date or time becomes text in ISO 8601; a
    duration a number of seconds; bytes become text in base64; numpy's numbers and arrays those of Python.
    where: the file and the row, for messages. depth: how many lists and objects contain the value.
    Raises ConfigError for what JSON or UTF-8 cannot carry: NaN, infinities, unpaired surrogates, integers of
    more than 64 bits, other types.
    Example: {"price": Decimal("1.50"), "data": b"PNG"} becomes {"price": "1.50", "data": "UE5H"}.
    """
    if depth > DEEPEST:
        raise wrong(where, field, value, f"nest lists and objects at most {DEEPEST} deep")
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufU":
        value = value.tolist()
    if isinstance(value, str):
        return _encodable(value, where, field)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise wrong(where, field, value, "give an integer of at most 64 bits, or text")
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise wrong(where, field, value, "give a finite number or text, or leave the key out")
        return value
    if isinstance(value, Mapping):
        if strange := [key for key in value if not isinstance(key, str)]:
            raise wrong(where, f"{field}: a key", strange[0], "give text as keys")
        return {
            _encodable(key, where, field): plain(part, where, f"{field}.{key}", depth + 1)
            for key, part in value.items()
        }
    if isinstance(value, list | tuple):
        return [plain(part, where, field, depth + 1) for part in value]
    return _as_text_or_number(value, where, field)


def _as_text_or_number(value: Any, where: str, field: str) -> str | float:
    if isinstance(value, bytes):
        return b64encode(value).decode("ascii")
    if isinstance(value, Decimal) and value.is_finite():
        return f"{value:f}"
    if isinstance(value, datetime.date | datetime.time):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, UUID):
        return str(value)
    raise wrong(where, field, value, f"{type(value).__name__} has no form in JSON; give text or a number")


def _encodable(text: str, where: str, field: str) -> str:
    """Return the text. Raises ConfigError for an unpaired surrogate, which JSON can contain and UTF-8 not."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise wrong(where, field, text[error.start], "remove the unpaired surrogate") from None
    return text


def without_nulls(value: Any) -> Any:
    """Return the value without the keys whose value is None, at every depth. Nulls in lists stay.

    All rows of a Parquet file have the same keys, and null where a row has no value.
    """
    if isinstance(value, Mapping):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    if isinstance(value, list | tuple):
        return [without_nulls(part) for part in value]
    return value


def wrong(where: str, field: str, value: Any, remedy: str) -> ConfigError:
    """Return the error for a value of a row, in one line of limited length."""
    shown = repr(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return ConfigError(f"{where}: {field}={shown} is missing or malformed; {remedy}")
